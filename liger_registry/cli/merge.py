"""``liger-tune merge``: several exports or directories of tables into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from liger_registry.cli import _render, _report


def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE", help="Exports, tables, or directories of tables.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write, or a directory.")],
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Merge exports or directories of tables into one.

    Of two entries of one key the newer counts, of one date that of the later source.
    """
    from liger_registry.cli import _archive
    from liger_registry.errors import TableError
    from liger_registry.store import LAYOUT

    if not force and output.is_file():
        raise TableError(f"{output} is there already", fix="name another file, or pass --force")
    tables = [table for source in sources for table in _archive.collect(source)]
    if output.is_dir():
        # A directory is added to, as a store is: what it holds and no source names stays.
        tables = [*(_archive.collect(output) if any(output.glob(f"{LAYOUT}/*/*/*/*.json")) else ()), *tables]
    merged = _archive.combined(tables)
    _archive.write(output, merged.values())
    count = sum(len(table.decisions) for table in merged.values())
    if json:
        _render.emit_json({"file": str(output), "tables": len(merged), "decisions": count})
    else:
        said = f"{_report.plural(len(merged), 'table')}, {_report.plural(count, 'decision')}"
        typer.echo(f"{output}: {said} from {_report.plural(len(sources), 'source')}")
