"""``liger-tune new-plugin``: a distribution to begin a kernel with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from liger_registry.cli import _render


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The distribution's name, such as fast-rms-norm.")],
    op: Annotated[str, typer.Option("--op", metavar="OP", help="rms_norm, softmax or relu_squared.")] = "rms_norm",
    directory: Annotated[Path, typer.Option(metavar="DIR", help="Where its directory is made.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a plugin: a kernel, its config space, tests, CI.

    A distribution that installs as it is: a Triton kernel and a PyTorch implementation of an operation's forward phase,
    held to the public conformance suite, with a workflow, a README and a licence. Nothing is overwritten.
    """
    from liger_registry.new_plugin import write

    files = write(name, op, directory)
    root = directory / name
    if json:
        _render.emit_json({"directory": str(root), "files": [str(path) for path in files]})
        return
    for path in files:
        typer.echo(f"  {path}")
    typer.echo(
        f"\nNext:\n  cd {root} && pip install -e '.[test]' && pytest\n  liger-tune warmup --op {op}"
        f"\n  liger-tune plugins\n{root / 'README.md'} says what to change."
    )
