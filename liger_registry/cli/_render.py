"""What verbs print: tables for people, JSON for programs, progress where somebody watches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from liger_registry.errors import SettingError
from liger_registry.table import duration

# What a pipe or a log file gets: rich would fold tables at 80 columns there.
_PIPE_WIDTH = 200


def rank() -> int:
    """This process's rank under torchrun; 0 elsewhere."""
    return environ_number("RANK", 0)


def environ_number(name: str, default: int) -> int:
    """The number in a variable that torchrun sets.

    Raises:
        SettingError: it is none.
    """
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise SettingError(
            f"{name}={shown!r} is no number", why="torchrun sets it", fix=f"unset {name}, or use torchrun"
        )
    return int(text)


def emit_json(value: object) -> None:
    """Print ``value`` as JSON; what JSON does not know is printed as its text."""
    typer.echo(json.dumps(value, indent=1, default=str))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[str] = (),
    width: int = _PIPE_WIDTH,
    folded: Sequence[str] = (),
) -> None:
    """Print a table.

    Args:
        columns: the headings.
        rows: the cells, as anything that has a text.
        right: the columns that are aligned to the right.
        width: of the table, where no terminal sets one.
        folded: the columns that give way where the table is too wide; all of them if none is named.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=bool(folded) and name not in folded,
        )
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else width, highlight=False)
    with console.capture() as capture:
        console.print(made)
    # Padding to the right edge is noise in a log.
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


def microseconds(value: float | None) -> str:
    """A time for people, ``63.2 us``; a dash for none."""
    return "-" if value is None else duration(value)


def size(value: int | None) -> str:
    """A number of bytes for people: ``0``, ``262 KiB``, ``1.5 GiB``."""
    if value is None:
        return "-"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return str(value)


def gain(default_us: float | None, time_us: float | None) -> str:
    """How much faster than the default, ``1.31x``."""
    return f"{default_us / time_us:.2f}x" if default_us and time_us else "-"


@contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on stderr, as a function of the steps done and what is at work.

    It shows on rank 0 only, and not where ``quiet`` is set or stderr is no terminal.
    """
    if quiet or rank() != 0 or not sys.stderr.isatty():
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def items(text: Any) -> list[str]:  # noqa: ANN401 - a list of texts, or None as typer gives it
    """The parts of options that may be repeated or hold commas."""
    return [part.strip() for entry in text or () for part in entry.split(",") if part.strip()]


def fields(value: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass
    """A dataclass's fields by name, one level deep."""
    import dataclasses

    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
