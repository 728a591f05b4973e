"""Tables outside a store: one file for many of them, directories, and how several become one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from liger_registry import json_text
from liger_registry.digest import checked, sealed
from liger_registry.document import parse, render
from liger_registry.errors import TableError, TableInvalidError, UnknownDeviceError
from liger_registry.locking import locked
from liger_registry.store import LAYOUT, TableStore, read_bytes, read_file, write_file
from liger_registry.table import Sample, Stored, Table

VERSION = 1
_FIX = "name a file that `liger-tune export` wrote, or export it again"
Tables = Mapping[tuple[tuple[str, str, str], str], Table]
_E = TypeVar("_E", Stored, Sample)


def collect(path: Path) -> list[Table]:
    """Every table in an export, in a single table's file, or below a directory that holds ``v1``.

    Raises:
        TableError: it cannot be read, or holds none.
        TableInvalidError: a table or an entry of it does not validate; nothing of such a source is used.
    """
    if path.is_dir():
        found = [(str(file), read_file(file)) for file in sorted(path.glob(f"{LAYOUT}/*/*/*/*.json"))]
    else:
        found = _read_export(path)
    for name, table in found:
        if table.skipped:
            raise TableInvalidError(
                f"{len(table.skipped)} entries of {name} do not validate",
                why="; ".join(table.skipped[:3]),
                fix="export it again with the version that wrote it",
            )
    if not found:
        raise TableError(f"{path} holds no tables", fix=f"give an export, a table, or a directory that holds {LAYOUT}/")
    return [table for _, table in found]


def _read_export(path: Path) -> list[tuple[str, Table]]:
    try:
        data = read_bytes(path)[0]
        document = json_text.loads(data)
    except OSError as error:
        why = error.strerror or str(error)
        raise TableError(f"{path} cannot be read", why=why, fix="name an export, a table, or a directory") from error
    except TableInvalidError as error:
        raise TableInvalidError(f"{path} cannot be read", why=error.what, fix=_FIX) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TableInvalidError(f"{path} is no valid JSON", why=str(error)[:200], fix=_FIX) from error
    if not isinstance(document, dict) or "export" not in document:
        return [(str(path), _parsed(str(path), data))]
    version, tables = document["export"], document.get("tables")
    if type(version) is not int or version != VERSION or not isinstance(tables, list):
        raise TableInvalidError(
            f"{path} is no export that this version can read", why=f"export is {version!r:.40}", fix=_FIX
        )
    try:
        digest = checked(data, document)
        texts = [json.dumps(entry) for entry in tables]
    except TableInvalidError as error:
        raise TableInvalidError(f"{path} cannot be used", why=f"{error.what}: {error.why}", fix=error.fix) from error
    except (ValueError, RecursionError) as error:
        raise TableInvalidError(f"{path} is no valid JSON", why=str(error)[:200], fix=_FIX) from error
    named = [(f"table {n} of {path}", text) for n, text in enumerate(texts)]
    return [(name, replace(_parsed(name, text), digest=digest)) for name, text in named]


def undigested(tables: Iterable[Table]) -> list[str]:
    """A note for tables of which nobody can tell whether they are as they were written; none if there are none."""
    ops = sorted({table.op for table in tables if not table.digest})
    if not ops:
        return []
    return [f"no digest, so whether it was changed since it was written cannot be told: {', '.join(ops)}"]


def _parsed(name: str, data: str | bytes) -> Table:
    try:
        return parse(data)
    except TableInvalidError as error:
        why = "; ".join(part for part in (error.what, error.why) if part)
        raise TableInvalidError(f"{name} is no table", why=why, fix=error.fix or _FIX) from error


def write(path: Path, tables: Iterable[Table]) -> None:
    """Write tables to one file, or below a directory, each file whole or not at all.

    Raises:
        TableError: it cannot be written.
    """
    kept = sorted(tables, key=lambda table: (table.directory, table.op))
    try:
        if path.is_dir():
            for table in kept:
                target = TableStore(path).path(table.directory, table.op)
                _make_shared(path, target.parent)
                write_file(target, table, 0o644)
            return
        body = ",\n".join(render(table, seal=False) for table in kept)
        text = sealed(f'{{\n"export": {VERSION},\n"tables": [\n{body}]}}\n')
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except TableError:
        raise
    except OSError as error:
        raise TableError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            fix="name a place that can be written, and has room",
        ) from error


def _make_shared(root: Path, directory: Path) -> None:
    """Make the directories from a root down to a table's: for all to read, whatever the umask, and for us to write.

    Raises:
        TableError: a link leads out of the root.
    """
    if not Path(os.path.realpath(directory)).is_relative_to(os.path.realpath(root)):
        raise TableError(f"{directory} leads out of {root}", fix="replace the link by a directory")
    for part in directory.relative_to(root).parts:
        root = root / part
        if not root.is_dir():
            root.mkdir()
            # LIGER_TUNE_TABLES refuses what a group can write to, which a common umask lets it.
            root.chmod(0o755)


def combined(tables: Sequence[Table], prefer_later: bool = False) -> Tables:
    """Tables of one device and operation merged into one each; of two entries of one key the newer counts.

    Args:
        tables: in the order in which, of two entries of the same date, the later counts.
        prefer_later: the later table counts whatever the dates say.
    """
    groups: dict[tuple[tuple[str, str, str], str], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.directory, table.op), []).append(table)
    merged = {}
    for key, group in groups.items():
        decisions = _in_order((d for table in group for d in table.decisions.values()), prefer_later)
        samples = _in_order((s for table in group for s in table.samples.values()), prefer_later)
        device = next((table.device for table in reversed(group) if table.device), {})
        merged[key] = Table(*key, device=device).merged(decisions, samples)
    return merged


def _in_order(entries: Iterable[_E], as_given: bool) -> list[_E]:
    return list(entries) if as_given else sorted(entries, key=lambda entry: entry.provenance.date)


def selected(tables: Iterable[Table], ops: Sequence[str], devices: Sequence[str], samples: bool = True) -> list[Table]:
    """The tables of some operations and devices (all where none is named), with or without their samples.

    A device is named by its directory (``cuda/sm_90/h200-132``), by a part of it (``h200-132``, ``h200``, ``cuda``),
    or by another name of it (``h100``).

    Raises:
        UnknownDeviceError: there is no such device, neither in the tables nor by name.
    """

    tables = list(tables)
    asked = {name for device in devices for name in _names_of(device, tables)}

    def wanted(table: Table) -> bool:
        return (not ops or table.op in ops) and (not devices or bool(_names(table) & asked))

    kept = [table for table in tables if wanted(table)]
    return kept if samples else [replace(table, samples={}) for table in kept]


def _names(table: Table) -> set[str]:
    vendor, arch, unit = table.directory
    return {"/".join(table.directory), vendor, arch, unit, unit.rpartition("-")[0]}


def _names_of(device: str, tables: Sequence[Table]) -> tuple[str, ...]:
    """The names under which tables know what a user calls a device."""
    from liger_registry.device import VENDORS, Device, capability_number

    known = {name for table in tables for name in _names(table)}
    if device in known or device in VENDORS or capability_number(device):
        return (device,)
    try:
        return device, Device.parse(device).sku
    except UnknownDeviceError as error:
        raise UnknownDeviceError(
            error.what,
            candidates=dict.fromkeys([*sorted(known), *error.candidates]),
            fix="name a candidate; `liger-tune list` shows the devices that have tables",
        ) from None


def tables_of(store: TableStore) -> list[Table]:
    """Every table of a store that holds anything."""
    return [
        table for directory in store.devices() for op in store.ops(directory) if (table := store.load(directory, op))
    ]


def rewrite(store: TableStore, table: Table, change: Callable[[Table], Table]) -> None:
    """Replace a table in a store by what ``change`` makes of it, under the lock that tuning takes.

    Raises:
        TableError: it cannot be written, or another process holds it for half a minute.
    """
    path = store.path(table.directory, table.op)
    try:
        with locked(path, 30.0):
            changed = change(read_file(path))
            if changed:
                write_file(path, changed)
            else:
                path.unlink()
    except TimeoutError as error:
        raise TableError(f"another process keeps {path} locked", fix="try again when it is done") from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(
            f"{path} cannot be written",
            why=getattr(error, "strerror", None) or str(error),
            fix="name a place that can be written, and has room",
        ) from error
