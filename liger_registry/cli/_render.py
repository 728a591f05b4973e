"""What verbs print: tables for people, JSON for programs, progress where somebody watches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

# What a pipe or a log file gets: rich would fold tables at 80 columns there.
_PIPE_WIDTH = 200


def rank() -> int:
    """This process's rank under torchrun; 0 elsewhere."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def emit_json(value: object) -> None:
    """Print ``value`` as JSON; what JSON does not know is printed as its text."""
    typer.echo(json.dumps(value, indent=1, default=str))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        columns: the headings.
        rows: the cells, as anything that has a text.
        right: the columns that are aligned to the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    with console.capture() as capture:
        console.print(made)
    # Padding to the right edge is noise in a log.
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


def microseconds(value: float | None) -> str:
    """A time for people: ``63.2 us``, ``1.48 ms``, ``2.10 s``."""
    if value is None:
        return "-"
    for unit, size in (("us", 1.0), ("ms", 1e3), ("s", 1e6)):
        if value < 1000 * size or unit == "s":
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    raise AssertionError


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
