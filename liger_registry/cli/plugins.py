"""``liger-tune plugins``: which entry points were loaded, and why others were not."""

from __future__ import annotations

from typing import Annotated

import typer

from liger_registry.cli import _render
from liger_registry.cli._errors import FAILED


def plugins(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the plugins found. Exit code 1 if one failed to load."""
    from liger_registry.runtime import registry
    from liger_registry.transformers.engine.adapters import adapters

    records = (*registry.plugins(), *adapters().records)
    if json:
        _render.emit_json([_render.fields(record) for record in records])
    else:
        rows = [(r.name, r.distribution, r.version, r.group.rpartition(".")[2], r.status, r.reason) for r in records]
        _render.table(("plugin", "distribution", "version", "group", "status", "reason"), rows)
    if any(record.status == "failed" for record in records):
        raise typer.Exit(FAILED)
