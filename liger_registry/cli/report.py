"""``liger-tune report``: one page about what was chosen, how fast it is, and what is stale or missing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from liger_registry.cli import _render, _report
from liger_registry.errors import InvalidInputError, TableError

if TYPE_CHECKING:
    from liger_registry.table import Table


def report(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path("report.html"),
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP", help="Only these operations.")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="DEVICE", help="Only these devices, such as h200-132, h200 or cuda."),
    ] = None,
    copy_rate: Annotated[
        list[str] | None,
        typer.Option(metavar="SKU=TB/S", help="The rate at which a device copies, such as h100-sxm=2.9."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write one HTML page about what was chosen.

    Which implementation and config serves which problem and device, its time against default and bound, where the
    answer comes from, and what is stale or missing. The page holds all it needs: it can be mailed or archived.

    Needs the extra `report`: pip install 'liger-registry[report]'.
    """
    from liger_registry.cli import _archive
    from liger_registry.report.collect import collect
    from liger_registry.report.page import MARK, page
    from liger_registry.runtime import registry

    rates = dict(_rate(text) for text in _render.items(copy_rate))
    _check(out, MARK, force)
    ops = [registry.catalog.op(name).name for name in _render.items(op)]
    tables = [table for _, store in registry.stores() for table in _archive.tables_of(store)]
    chosen = _archive.selected(tables, ops, names) if (names := _render.items(device)) else ()
    found = collect(registry, ops, _fingerprints(chosen, names), rates)
    _write(out, page(found))
    counts = {
        "stale": len(found.stale),
        "missing": len(found.missing),
        "unusable": len(found.unusable),
    }
    if json:
        _render.emit_json({"file": str(out), "problems": len(found.entries), **counts})
    else:
        told = [_report.plural(len(found.entries), "problem"), *(f"{n} {name}" for name, n in counts.items() if n)]
        typer.echo(f"{out}: {', '.join(told)}")


def _rate(text: str) -> tuple[str, float]:
    """The SKU and the bytes a second of ``SKU=TB/S``."""
    sku, equals, number = text.partition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = math.nan
    if not (equals and sku and 0 < rate < 1000):
        raise InvalidInputError(f"--copy-rate {text} is no SKU=TB/S", fix="write --copy-rate h100-sxm=2.9")
    return sku, rate * 1e12


def _fingerprints(tables: Sequence[Table], names: Sequence[str]) -> list[str]:
    """The devices that tables were selected for; one that is no device's where none was found."""
    return sorted({"/".join(table.directory) for table in tables}) or list(names)


def _check(out: Path, mark: str, force: bool) -> None:
    """Raise TableError where something else than a report would be replaced."""
    if out.is_dir():
        raise TableError(f"{out} is a directory", fix=f"name a file, such as {out / 'report.html'}")
    if force or not out.exists():
        return
    with out.open("rb") as file:
        if file.read(len(mark)) != mark.encode():
            raise TableError(f"{out} is there already, and is no report", fix="name another file, or pass --force")


def _write(out: Path, text: str) -> None:
    """Write the page whole or not at all, readable for whom the process's umask lets read."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise TableError(
            f"{out} cannot be written", why=error.strerror or str(error), fix="name a place that can be written"
        ) from error
