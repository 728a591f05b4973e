"""``liger-tune export``: tables in one file, to carry to another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from liger_registry.cli import _render, _report


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, or an existing directory.")],
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP", help="Only these operations.")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="DEVICE", help="Only these devices, such as h200-132, h200 or cuda."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all-stores", help="Cluster and shipped tables too.")] = False,
    decisions: Annotated[bool, typer.Option("--decisions-only", help="Leave the samples out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write tables to a file, for another machine.

    It is what `liger-tune import` and `merge` read.

    Into a directory they are written as LIGER_TUNE_TABLES reads them.
    """
    from liger_registry.cli import _archive
    from liger_registry.errors import TableError
    from liger_registry.runtime import registry
    from liger_registry.store import LAYOUT

    if not force and (file.is_file() or (file.is_dir() and any(file.glob(f"{LAYOUT}/*")))):
        raise TableError(f"{file} is there already", fix="name another place, or pass --force")
    # The user's own tables last: of two measurements of one date they count.
    stores = [store for kind, store in reversed(registry.stores()) if everything or kind == "user"]
    found = [table for store in stores for table in _archive.tables_of(store)]
    chosen = _archive.selected(found, _render.items(op), _render.items(device), samples=not decisions)
    tables = _archive.combined(chosen)
    if not any(table.decisions or table.samples for table in tables.values()):
        raise TableError("there is nothing to export", why="no table fits", fix="`liger-tune list` shows what there is")
    _archive.write(file, tables.values())
    count = sum(len(table.decisions) for table in tables.values())
    if json:
        _render.emit_json({"file": str(file), "tables": len(tables), "decisions": count})
    else:
        said = f"{_report.plural(len(tables), 'table')}, {_report.plural(count, 'decision')}"
        typer.echo(f"{file}: {said}")
