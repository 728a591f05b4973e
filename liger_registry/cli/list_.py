"""``liger-tune list``: the decisions in the tables."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from liger_registry.cli import _render

STORES = ("user", "cluster", "shipped")


def list_decisions(
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP", help="Only these operations.")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device", metavar="DEVICE", help="Only these devices, such as h200-132, h200 or cuda; all by default."
        ),
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option("--store", metavar="STORE", help=f"Only these stores: {', '.join(STORES)}.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the decisions in the tables.

    Problem, choice, time, gain over the default, and where each stands.
    """
    from liger_registry.cli import _archive
    from liger_registry.document import stored_json
    from liger_registry.errors import InvalidInputError
    from liger_registry.runtime import registry

    kinds = _render.items(store)
    if unknown := [kind for kind in kinds if kind not in STORES]:
        raise InvalidInputError(f"there is no store {unknown[0]!r}", candidates=STORES, fix="name a candidate")
    ops = [registry.catalog.op(name).name for name in _render.items(op)]
    rows: list[dict[str, Any]] = []
    for kind, place in registry.stores():
        if kinds and kind not in kinds:
            continue
        for table in _archive.selected(_archive.tables_of(place), ops, _render.items(device)):
            for stored in table.decisions.values():
                entry = {"device": "/".join(table.directory), "op": table.op, **stored_json(stored)}
                gain = stored.default_us / stored.time_us if stored.time_us else None
                stale = _staleness(registry, stored)
                rows.append(
                    {**entry, "gain": gain, "stale": stale, "store": kind, "root": str(place.root), "_": stored}
                )
    if json:
        _render.emit_json([{name: value for name, value in row.items() if name != "_"} for row in rows])
        return
    lines = [
        (
            row["device"],
            row["_"].problem.text,
            row["_"].choice,
            _render.microseconds(row["time_us"]),
            _render.gain(row["default_us"], row["time_us"]),
            row["store"] + (" (stale)" if row["stale"] else ""),
        )
        for row in rows
    ]
    if lines:
        _render.table(("device", "problem", "choice", "time", "gain", "source"), lines, right=("time", "gain"))
    else:
        typer.echo("no table holds a decision; `liger-tune warmup` measures some")


def _staleness(registry: Any, stored: Any) -> str:  # noqa: ANN401 - a Registry and a Stored, whose modules import torch
    return "" if stored.problem.phase == "scheme" else str(registry.dispatcher.staleness(stored))
