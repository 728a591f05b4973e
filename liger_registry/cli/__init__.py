"""``liger-tune``: measure, look up, move and check the tables that kernels are chosen from.

Exit codes, of every verb:

===== ==========================================================================
0     done
1     something failed or is left undone: a candidate, a compile, a problem
2     usage: an argument, a name or a setting that cannot be used
3     a table or a directory that cannot be read, written or trusted
4     another process is tuning on the device
5     Triton, a plugin or an extra that is needed is missing
130   interrupted
===== ==========================================================================

With ``--json`` a verb prints one JSON value on stdout and nothing else; errors and warnings go to stderr as text. No
verb imports torch before it runs, so that ``--help`` is immediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from liger_registry.cli import _errors

# Under names of their own, so that `liger_registry.cli.verify` stays the module.
from liger_registry.cli.compile import compile_configs as compile_verb
from liger_registry.cli.doctor import doctor as doctor_verb
from liger_registry.cli.exec import CONTEXT as EXEC_CONTEXT
from liger_registry.cli.exec import exec_command as exec_verb
from liger_registry.cli.explain import CONTEXT
from liger_registry.cli.explain import explain as explain_verb
from liger_registry.cli.export import export as export_verb
from liger_registry.cli.import_ import import_tables as import_verb
from liger_registry.cli.list_ import list_decisions as list_verb
from liger_registry.cli.merge import merge as merge_verb
from liger_registry.cli.new_plugin import new_plugin as new_plugin_verb
from liger_registry.cli.plugins import plugins as plugins_verb
from liger_registry.cli.prune import prune as prune_verb
from liger_registry.cli.report import report as report_verb
from liger_registry.cli.verify import verify as verify_verb
from liger_registry.cli.warmup import warmup as warmup_verb

_HELP = {"help_option_names": ["-h", "--help"]}
# Plain help: rich's takes 0.1 s to import, and its boxes do not survive a log.
app = typer.Typer(
    name="liger-tune",
    cls=_errors.Verbs,
    help="Measure kernels once per device, keep the choices in tables, and look after them.",
    epilog=_errors.EPILOG,
    no_args_is_help=True,
    add_completion=False,
    context_settings=_HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from liger_registry._version import __version__

        typer.echo(f"liger-registry {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Measure kernels once per device, keep the choices in tables, and look after them."""


_VERBS: dict[str, Callable[..., None]] = {
    "warmup": warmup_verb,
    "list": list_verb,
    "explain": explain_verb,
    "verify": verify_verb,
    "compile": compile_verb,
    "export": export_verb,
    "import": import_verb,
    "merge": merge_verb,
    "prune": prune_verb,
    "plugins": plugins_verb,
    "doctor": doctor_verb,
    "exec": exec_verb,
    "report": report_verb,
    "new-plugin": new_plugin_verb,
}
_CONTEXTS = {"explain": CONTEXT, "exec": EXEC_CONTEXT}
for _name, _verb in _VERBS.items():
    app.command(_name, context_settings=_CONTEXTS.get(_name, _HELP), epilog=_errors.EPILOG)(_verb)


def main() -> None:
    """Run the command line of this process."""
    _errors.show_warnings_as_lines()
    app(prog_name="liger-tune")
