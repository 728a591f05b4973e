"""Writes what of these pages follows from the code, one page a command: ``python docs/generate.py``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from liger_registry.cli import app
from liger_registry.cli._errors import EPILOG

HERE = Path(__file__).parent
MADE = "<!-- Written by docs/generate.py; do not edit. -->"


def pages() -> dict[str, str]:
    """Each page's path below docs/ and its text."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    made = {f"commands/{name}.md": _page(name, command) for name, command in commands.items()}
    made["commands/index.md"] = _index(commands)
    return made


def _index(commands: dict[str, Any]) -> str:
    rows = [f"| [`{name}`]({name}.md) | {_paragraphs(command)[0]} |" for name, command in commands.items()]
    codes = [code.strip().rstrip(".") for code in EPILOG.removeprefix("Exit codes: ").split(";")]
    lines = [f"| {number} | {text} |" for number, _, text in (code.partition(" ") for code in codes)]
    return "\n".join(
        [
            f"{MADE}\n\n# Commands\n",
            "`liger-tune VERB` is the command; `python -m liger_registry VERB` is the same. With `--json`",
            "a verb prints one JSON value on stdout and nothing else; errors go to stderr as text.\n",
            "| verb | what it does |\n|---|---|",
            *rows,
            "\n## Exit codes\n",
            "| code | meaning |\n|---|---|",
            *lines,
            "",
        ]
    )


def _page(name: str, command: Any) -> str:  # noqa: ANN401 - a command of whichever click typer brings
    arguments = [p for p in command.params if p.param_type_name == "argument" and not p.hidden]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["liger-tune", name, "[OPTIONS]", *map(_argument, arguments)])
    lines = [
        f"{MADE}\n",
        f"# liger-tune {name}\n",
        *(f"{text}\n" for text in _paragraphs(command)),
        f"```text\n{usage}\n```\n",
    ]
    if arguments:
        lines += ["| argument | meaning |\n|---|---|", *(f"| `{p.metavar}` | {_cell(p.help)} |" for p in arguments), ""]
    lines += ["| option | meaning | default |\n|---|---|---|"]
    lines += [f"| {_option(p)} | {_cell(p.help)} | {_default(p)} |" for p in options]
    lines += [
        "| `-h`, `--help` | Show the help and leave. | |",
        "",
        "Exit codes: [all verbs'](index.md#exit-codes).",
        "",
    ]
    return "\n".join(lines)


def _paragraphs(command: Any) -> list[str]:  # noqa: ANN401
    text = inspect.cleandoc(command.help or "")
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def _argument(parameter: Any) -> str:  # noqa: ANN401
    name = f"{parameter.metavar}{'...' if parameter.nargs == -1 else ''}"
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:  # noqa: ANN401
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    return names if parameter.is_flag else f"{names} `{parameter.metavar or 'VALUE'}`"


def _default(parameter: Any) -> str:  # noqa: ANN401
    plain = parameter.is_flag or parameter.default in (None, (), [])
    return "" if plain or callable(parameter.default) else f"`{parameter.default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def main() -> None:
    """Write the pages, and remove those of verbs that are gone."""
    made = pages()
    for path in (HERE / "commands").glob("*.md"):
        if f"commands/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
