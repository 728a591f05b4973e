"""``liger-tune import``: take tables from a file into the cache directory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from liger_registry.cli import _render
from liger_registry.cli._errors import FAILED

if TYPE_CHECKING:
    from liger_registry.store import TableStore
    from liger_registry.table import Table


def import_tables(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An export, a table, or a directory of tables.")],
    yes: Annotated[bool, typer.Option("--yes", help="Write; without it the difference is shown alone.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Take the file's entry even if ours is newer.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take tables from a file into the cache directory.

    They are validated, and held against their digest; what they would change is shown, and --yes writes it.

    Nothing is written outside the cache directory. Of two entries of one key the newer stays. Exit code 1 if there are
    changes and --yes was not given, 3 if anything in the file does not validate.
    """
    from liger_registry.cli import _archive
    from liger_registry.device import Device
    from liger_registry.runtime import registry
    from liger_registry.table import diff

    store = registry.user_store
    found = _archive.collect(file)
    theirs = _archive.combined(found)
    changes: list[str] = []
    notes = _archive.undigested(found)
    changed: list[Table] = []
    for (directory, op), table in theirs.items():
        # The device must be one, and that of the directory: both end up in a path.
        _same_device(Device.from_json(table.device), table)
        ours = store.load(directory, op)
        merged = _archive.combined([ours, table], prefer_later=replace)[directory, op]
        lines = diff(ours, merged)
        changes += [f"{'/'.join(directory)}: {line}" for line in lines]
        notes += _unknown(registry.catalog, table)
        changed += [merged] if lines else []
    if yes:
        for merged in changed:
            _write(store, merged)
    written = yes and bool(changes)
    if json:
        _render.emit_json({"changes": changes, "notes": notes, "written": written, "root": str(store.root)})
    else:
        typer.echo("\n".join([*changes, *(f"note: {note}" for note in notes)] or ["no changes"]))
        if changes:
            typer.echo(f"written to {store.root}" if yes else "nothing was written; run it again with --yes")
    if changes and not yes:
        raise typer.Exit(FAILED)


def _same_device(device: object, table: Table) -> None:
    from liger_registry.errors import TableInvalidError

    if getattr(device, "directory", None) != table.directory:
        raise TableInvalidError(
            f"the table of {table.op} lies under another device than it describes", why="/".join(table.directory)
        )


def _unknown(catalog: object, table: Table) -> list[str]:
    """What this installation cannot use of a table; it is imported all the same, for what is installed later."""
    from liger_registry.cli._prune import why_unknown

    found: dict[str, int] = {}
    for stored in table.decisions.values():
        if reason := why_unknown(catalog, stored):
            found[reason] = found.get(reason, 0) + 1
    return [f"{table.op}: {count} decisions cannot be used here: {reason}" for reason, count in found.items()]


def _write(store: TableStore, merged: Table) -> None:
    from liger_registry.device import Device
    from liger_registry.errors import TableError
    from liger_registry.store import TableStore

    device = Device.from_json(merged.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.record(device, merged.op, merged.decisions.values(), merged.samples.values())
    # A store that cannot write goes on in memory, which helps a run and not an import.
    there = TableStore(store.root).load(device, merged.op).decisions
    if any(there.get(key) != stored for key, stored in merged.decisions.items()):
        why = "; ".join(str(warning.message) for warning in caught)
        raise TableError(f"the table of {merged.op} was not written below {store.root}", why=why)
