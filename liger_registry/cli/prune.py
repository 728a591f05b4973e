"""``liger-tune prune``: remove what has outlived its use from the cache directory."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from liger_registry.cli import _render


def prune(
    stale: Annotated[
        bool, typer.Option("--stale", help="Also what another Triton, or code changed since, was measured with.")
    ] = False,
    older: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Also what is older: 90d, 12w, 2026-01-31.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP", help="Only these operations' tables.")] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="DEVICE", help="Only these devices' tables.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove entries that have outlived their use.

    Always those that nothing installed can use: unknown operations, implementations and configs.

    What belongs to a plugin that is only not loaded now is kept.
    """
    from liger_registry.cli import _archive, _prune
    from liger_registry.runtime import registry

    reasons = [_prune.unknown(registry.catalog, registry.plugins())]
    if stale:
        reasons.append(_prune.stale(registry.dispatcher))
    if older is not None:
        reasons.append(_prune.older_than(older))
    store = registry.user_store
    rows: list[dict[str, Any]] = []
    for table in _archive.selected(_archive.tables_of(store), _render.items(op), _render.items(device)):
        _, gone = _prune.prune(table, reasons)
        for reason, entries in gone.items():
            decisions = sum(1 for entry in entries if hasattr(entry, "default"))
            where = {"device": "/".join(table.directory), "op": table.op, "reason": reason}
            rows.append({**where, "decisions": decisions, "samples": len(entries) - decisions})
        if gone and not dry_run:
            _archive.rewrite(store, table, lambda current: _prune.prune(current, reasons)[0])
    if json:
        _render.emit_json({"removed": [] if dry_run else rows, "would_remove": rows if dry_run else []})
        return
    if rows:
        _render.table(tuple(rows[0]), [tuple(row.values()) for row in rows], right=("decisions", "samples"))
    total = sum(row["decisions"] + row["samples"] for row in rows)
    typer.echo(f"{total} entries {'would go' if dry_run else 'removed'} below {store.root}")
