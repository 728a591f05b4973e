"""What warmup prints for people: a table that fits a terminal, without what all of its rows share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from liger_registry.cli import _render
from liger_registry.problem import PHASES, Problem

if TYPE_CHECKING:
    from liger_registry.tuning.report import Row

WIDTH = 100
# The default was measured and is the choice.
_WORDS = {"default": "kept"}


def print_rows(rows: Sequence[Row], undone: Sequence[str]) -> None:
    """Print the rows of a run, ordered by operation, phase and sizes, and why any was left undone."""
    rows = sorted(rows, key=lambda row: _order(row.problem))
    # "rows x hidden" as a heading where all have the same sizes, else each cell names them.
    kinds = {tuple(row.problem.dims) for row in rows}
    described = [_parts(row.problem, " x ".join(next(iter(kinds))) if len(kinds) == 1 else "") for row in rows]
    # With one row everything is shared, and a table without a column that says what it is about is none.
    told = {"phase", "sizes", *(" x ".join(kind) for kind in kinds)}
    shared = {name: value for name, value in _shared(described).items() if name not in told}
    if shared:
        typer.echo("all: " + ", ".join(_said(name, value) for name, value in shared.items()) + "\n")
    names = [name for name in dict.fromkeys(n for parts in described for n in parts) if name not in shared]
    columns = (*names, "chosen", "time", "default", "gain", "status")
    lines = [
        (
            *(parts.get(name, "") for name in names),
            _chosen(row),
            _render.microseconds(row.time_us),
            _render.microseconds(row.default_us),
            _render.gain(row.default_us, row.time_us),
            _WORDS.get(row.status, row.status),
        )
        for row, parts in zip(rows, described, strict=True)
    ]
    if lines:
        _render.table(columns, lines, right=("time", "default", "gain"), width=WIDTH, folded=("chosen", "dtype"))
    for row in rows:
        if row.status in undone:
            where = " ".join(value for name, value in _parts(row.problem).items() if name not in shared)
            typer.echo(f"{row.status}: {where}: {row.detail}")


def _order(problem: Problem) -> tuple[object, ...]:
    sizes = [(name, value) for name, value in problem.dims.items() if isinstance(value, int)]
    return problem.op, PHASES.index(problem.phase), sizes, problem.dtypes.text, problem.flags.text


def _chosen(row: Row) -> str:
    """The choice in words, which a narrow column can fold."""
    if row.choice is None:
        return "-"
    return " ".join([row.choice.implementation, *(f"{name}={value}" for name, value in row.choice.config.items())])


def _parts(problem: Problem, sizes: str = "") -> dict[str, str]:
    """What tells a problem from others, by heading; ``sizes`` is the heading of its sizes, if that names them."""
    if sizes:
        dims = {sizes: " x ".join(str(value) for value in problem.dims.values())}
    else:
        dims = {"sizes": " ".join(f"{name} {value}" for name, value in problem.dims.items())}
    dtypes = {name: str(dtype) for name, dtype in problem.dtypes.items()}
    present = {dtype for dtype in dtypes.values() if dtype != "none"}
    if len(present) == 1:
        absent = [f"no {name}" for name, dtype in dtypes.items() if dtype == "none"]
        dtype = ", ".join([*present, *absent])
    else:
        dtype = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    scheme = {} if problem.scheme in ("", "default") else {"scheme": problem.scheme}
    return {
        "op": problem.op,
        "phase": problem.phase,
        **scheme,
        **dims,
        "dtype": dtype,
        **{name: str(value) for name, value in problem.flags.items()},
    }


def _shared(described: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is the same wherever it is said."""
    found: dict[str, set[str]] = {}
    for parts in described:
        for name, value in parts.items():
            found.setdefault(name, set()).add(value)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def _said(name: str, value: str) -> str:
    return value if name in ("op", "dtype") else f"{name} {value}"


def plural(count: int, name: str) -> str:
    """``1 table``, ``2 tables``."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def listed(parts: Sequence[object]) -> str:
    """``1, 2 and 3``."""
    texts = [str(part) for part in parts]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def counted(rows: Sequence[Row]) -> Iterator[str]:
    """How many rows there are of each status."""
    for status in dict.fromkeys(row.status for row in rows):
        yield f"{sum(row.status == status for row in rows)} {_WORDS.get(status, status)}"
