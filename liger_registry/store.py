"""Tables in files: ``<root>/v1/<vendor>/<arch>/<sku>-<units>/<op>.json``.

Writers take a lock beside the table, read it again, merge, and replace it by a file that is already on the disk, so
that no update is lost and no reader sees half a table. What goes wrong with a directory costs a warning, not the run.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from liger_registry.document import MAX_BYTES, SCHEMA, NewerSchemaError, check_name, normal, parse, render
from liger_registry.errors import RegistryError, TableError, TableInvalidError, TableWarning
from liger_registry.lines import Lines
from liger_registry.locking import locked as _locked
from liger_registry.table import Directory, Sample, Stored, Table
from liger_registry.trust import refuse_untrusted

# Versions with other schemas share a root without touching each other's tables.
LAYOUT = f"v{SCHEMA}"
_LOCKLESS = "is on a file system without locks: of processes on several machines the last to write wins"
KEPT_BAD = 4
ABANDONED_S = 600.0
Signature = tuple[int, int, int, int]
_Key = tuple[Directory, str]

_warned: set[str] = set()
_warned_lock = threading.Lock()


class Place(Protocol):
    """What a store needs of a device."""

    @property
    def directory(self) -> Directory:
        """Vendor, arch and ``sku-units``."""

    def to_json(self) -> dict[str, Any]:
        """The device as JSON values."""


class TableStore:
    """The tables below one root.

    Args:
        root: the directory that holds ``v1``; it need not exist.
        readonly: a search path: nothing is written, renamed or locked, and what others can write to is refused.
        trusted: the root is a package's own directory, whose code has the same permissions: refuse nothing for them.
        lock_timeout_s: how long to wait for another process that writes the same table.
    """

    def __init__(
        self, root: Path | str, readonly: bool = False, *, trusted: bool = False, lock_timeout_s: float = 30.0
    ) -> None:
        self.root = Path(root)
        self.readonly = readonly
        self._guarded = readonly and not trusted and os.name != "nt"
        self._lock_timeout_s = lock_timeout_s
        self._memo: dict[_Key, tuple[Signature | None, Table]] = {}
        self._unsaved: dict[_Key, Table] = {}
        self._joined: dict[_Key, tuple[Table, Table, Table]] = {}
        self._lines: dict[_Key, tuple[Lines, Lines]] = defaultdict(lambda: (Lines(), Lines()))
        self._recording = threading.Lock()

    def __repr__(self) -> str:
        return f"TableStore({str(self.root)!r}{', readonly=True' if self.readonly else ''})"

    def path(self, device: Place | Directory, op: str) -> Path:
        """The file of a table.

        Raises:
            TableInvalidError: a part of the device's directory or the operation's name cannot stand in a path.
        """
        directory = _directory(device)
        for part in directory:
            check_name(part, "part of a device's directory")
        return self.root.joinpath(LAYOUT, *directory, f"{check_name(op, 'operation')}.json")

    def load(self, device: Place | Directory, op: str) -> Table:
        """The table of an operation on a device; empty if there is none or it cannot be used. It never raises.

        Costs a stat as long as the file stays the same. A file that is no table is set aside as ``.bad``; a problem is
        warned of once a path.
        """
        key = (_directory(device), op)
        # In this order: what another thread writes between the two is in both, not in neither.
        unsaved = self._unsaved.get(key)
        table = self._on_disk(key)
        if unsaved is None:
            return table
        joined = self._joined.get(key)
        if joined is None or joined[0] is not table or joined[1] is not unsaved:
            both = table.merged(unsaved.decisions.values(), unsaved.samples.values())
            joined = self._joined[key] = (table, unsaved, both)
        return joined[2]

    def record(self, device: Place, op: str, decisions: Iterable[Stored] = (), samples: Iterable[Sample] = ()) -> None:
        """Persist entries; when this returns without a warning they are on the disk.

        What cannot be written stays in memory, is answered by ``load``, and is tried again with the next entries.

        Raises:
            TableInvalidError: an entry that no table can hold, or of another operation. Nothing is written.
            TableError: the store is read-only.
        """
        if self.readonly:
            raise TableError(f"{self.root} is a read-only path of tables", fix="record into the user's cache")
        path, key = self.path(device, op), (_directory(device), op)
        new_decisions, new_samples = [normal(d) for d in decisions], [normal(s) for s in samples]
        for other in {d.problem.op for d in new_decisions}.union(s.problem.op for s in new_samples) - {op}:
            raise TableInvalidError(f"an entry of {other} cannot be recorded for {op}")
        # Which of several equal devices measured says nothing, and would differ from write to write.
        described = {name: value for name, value in device.to_json().items() if name != "index"}
        notes: list[tuple[Path, str]] = []
        with self._recording:
            before = self._unsaved.get(key)
            if not (before or new_decisions or new_samples):
                return
            pending = (before or Table(*key)).merged(new_decisions, new_samples)
            try:
                self._make_directory(path.parent)
                # Once a write has failed, later ones do not wait long for the next failure.
                with _locked(path, self._lock_timeout_s if before is None else 1.0) as shared:
                    base = self._to_merge_into(path, key, notes)
                    table = base.merged(pending.decisions.values(), pending.samples.values())
                    table = replace(table, device=described, skipped=())
                    self._memo[key] = _write(path, render(table, self._lines[key])), table
                self._unsaved.pop(key, None)
                self._joined.pop(key, None)
                if not shared:
                    notes.append((self.root / LAYOUT, f"{self.root} {_LOCKLESS}"))
            except NewerSchemaError as error:
                self._unsaved[key] = pending
                notes.append((path, _left(path, error)))
            except (OSError, NotImplementedError, TableInvalidError) as error:
                self._unsaved[key] = pending
                what = f"tables below {self.root} cannot be written, results stay in memory"
                notes.append((self.root, f"{what}: {_told(error)}"))
        # Last, because a warning may be an error here.
        for place, message in notes:
            _warn_once(place, message)

    def siblings(self, device: Place | Directory, op: str) -> list[Table]:
        """The tables of the same operation on other devices of the same vendor and arch, without empty ones."""
        vendor, arch, unit = _directory(device)
        others = (name for name in _names(self.root / LAYOUT / vendor / arch) if name != unit)
        return [table for name in others if (table := self.load((vendor, arch, name), op))]

    def devices(self) -> list[Directory]:
        """Vendor, arch and ``sku-units`` of every device that has a directory."""
        top = self.root / LAYOUT
        return [
            (vendor, arch, unit)
            for vendor in _names(top)
            for arch in _names(top / vendor)
            for unit in _names(top / vendor / arch)
        ]

    def ops(self, device: Place | Directory) -> list[str]:
        """The operations that have a table for a device."""
        names = _names(self.root.joinpath(LAYOUT, *_directory(device)), directories=False)
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    # -- reading -----------------------------------------------------------------------------------------------------

    def _on_disk(self, key: _Key) -> Table:
        empty = Table(*key)
        signature: Signature | None = None
        bad: str | None = None
        try:
            path = self.path(*key)
        except TableInvalidError as error:
            _warn_once(self.root.joinpath(LAYOUT, *key[0], key[1]), _told(error))
            return empty
        try:
            try:
                signature = _signature(os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                return empty
            memo = self._memo.get(key)
            if memo is not None and memo[0] == signature:
                return memo[1]
            table, signature = self._read(path, key)
            self._memo[key] = signature, table
            if table.skipped:
                _warn_once(path, f"{len(table.skipped)} entries of {path} are left out, the first: {table.skipped[0]}")
            return table
        except FileNotFoundError:  # it went between the two looks
            return empty
        except NewerSchemaError as error:
            self._memo[key] = signature, empty
            _warn_once(path, _left(path, error))
        except TableInvalidError as error:
            bad = _told(error)
        except OSError as error:
            place = error.filename if isinstance(error.filename, str) else path
            _warn_once(place, f"{path} cannot be read: {_told(error)}")
        if bad is not None:
            self._memo[key] = signature, empty
            aside = None
            if not self.readonly:
                with suppress(OSError, NotImplementedError), _locked(path, 1.0):
                    aside = _set_aside(path, signature)
            _warn_once(path, _unused(path, aside, bad))
        return empty

    def _read(self, path: Path, key: _Key) -> tuple[Table, Signature]:
        self._refuse_foreign(path)
        data, signature = read_bytes(path)
        return parse(data, *key), signature

    def _to_merge_into(self, path: Path, key: _Key, notes: list[tuple[Path, str]]) -> Table:
        """What stands in the file now, under the lock.

        Raises:
            NewerSchemaError, OSError: it must not be replaced, because it may hold what could not be read.
        """
        try:
            signature = _signature(os.stat(path))
        except FileNotFoundError:
            return Table(*key)
        memo = self._memo.get(key)
        # An empty one may stand for a file that could not be used. And a file system that keeps whole milliseconds or
        # seconds cannot tell two quick writes apart.
        if memo is not None and memo[1] and memo[0] == signature and signature[3] % 1_000_000:
            return memo[1]
        try:
            return self._read(path, key)[0]
        except NewerSchemaError:
            raise
        except TableInvalidError as error:
            notes.append((path, _unused(path, _set_aside(path, signature), _told(error))))
            return Table(*key)

    def _refuse_foreign(self, path: Path) -> None:
        """Raise if a link leads out of the root, or if others could have written what is only to be read."""
        if not self._holds(path.parent):
            raise TableError(f"{path.parent} leads out of {self.root}", fix="replace the link by a directory")
        if not self._holds(path):
            raise TableInvalidError(f"{path.name} is a link that leads out of {self.root}")
        if self._guarded:
            refuse_untrusted(self.root, path)

    def _holds(self, path: Path) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.root))

    def _make_directory(self, directory: Path) -> None:
        if not self._holds(directory):
            raise TableError(f"{directory} leads out of {self.root}", fix="replace the link by a directory")
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self.root
        for part in directory.relative_to(self.root).parts:
            place = place / part
            place.mkdir(mode=0o700, exist_ok=True)


def read_file(path: Path | str) -> Table:
    """The table in a file, wherever it lies; ``Table.skipped`` says which entries were left out.

    Raises:
        TableError: there is none, or it cannot be read.
        TableInvalidError: it is no table.
    """
    try:
        return parse(read_bytes(Path(path))[0])
    except RegistryError:
        raise
    except OSError as error:
        raise TableError(f"{path} cannot be read", why=_told(error)) from error


def write_file(path: Path | str, table: Table, mode: int = 0o600) -> None:
    """Write a table to a file, whole or not at all; the directory must exist.

    Raises:
        TableError: it cannot be written.
        TableInvalidError: the table holds what JSON cannot.
    """
    text = render(table)
    try:
        _write(Path(path), text, mode)
    except OSError as error:
        raise TableError(f"{path} cannot be written", why=_told(error)) from error


def read_bytes(path: Path) -> tuple[bytes, Signature]:
    """A table's bytes and what identifies this version of the file.

    Raises:
        TableInvalidError: it is no regular file, or too large.
        OSError: it cannot be read.
    """
    # Opening a pipe without a writer would wait for one.
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TableInvalidError(f"{path.name} is no regular file")
        if status.st_size > MAX_BYTES:
            raise TableInvalidError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1), _signature(status)
    finally:
        os.close(fd)


def _write(path: Path, text: str, mode: int = 0o600) -> Signature:
    with suppress(OSError):
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of writers that were killed
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                leftover.unlink()
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(text.encode("ascii"))
            file.flush()
            # The kernel stamps files by its tick, 4 ms; two writes within one would look like one version, and so would
            # two under a clock that stands still or goes backwards. Below the millisecond the time is a random number.
            now = time.time_ns() // 1_000_000 * 1_000_000 + 1 + int.from_bytes(os.urandom(4), "big") % 999_999
            with suppress(OSError):  # some file systems let nobody set a time
                os.utime(name, ns=(now, now))
            if mode != 0o600:
                os.chmod(name, mode)
            os.fsync(file.fileno())
            signature = _signature(os.fstat(file.fileno()))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    if os.name != "nt":
        with suppress(OSError):  # some network file systems cannot sync a directory
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    return signature


def _set_aside(path: Path, signature: Signature | None) -> Path | None:
    """Rename what is no table, under the lock, unless another process has replaced it since."""
    with suppress(OSError):
        if _signature(os.stat(path)) == signature:
            names = [path.with_name(f"{path.name}.bad{f'.{n}' if n else ''}") for n in range(KEPT_BAD)]
            target = next((name for name in names if not os.path.lexists(name)), names[-1])
            os.replace(path, target)
            return target
    return None


def _signature(status: os.stat_result) -> Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _directory(device: Place | Directory) -> Directory:
    return device if isinstance(device, tuple) else device.directory


def _names(directory: Path, directories: bool = True) -> list[str]:
    with suppress(OSError), os.scandir(directory) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and (e.is_dir() or not directories))
    return []


def _told(error: Exception) -> str:
    if isinstance(error, RegistryError):
        return "; ".join(part for part in (error.what, error.why, error.fix) if part)
    return f"{type(error).__name__}: {error}"


def _unused(path: Path, aside: Path | None, why: str) -> str:
    return f"{path} is not used{f' and was set aside as {aside.name}' if aside else ''}: {why}"


def _left(path: Path, error: NewerSchemaError) -> str:
    return f"{path} is left as it is and not used, results for it stay in memory: {_told(error)}"


def _warn_once(path: Path | str, message: str) -> None:
    with _warned_lock:
        if str(path) in _warned:
            return
        _warned.add(str(path))
    warnings.warn(message, TableWarning, stacklevel=3)
