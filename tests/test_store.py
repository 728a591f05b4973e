"""Tables in files: writers that meet, writers that die, files that lie."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from liger_registry import document, store
from liger_registry.config import Config, Fields
from liger_registry.document import parse, render
from liger_registry.errors import TableError, TableInvalidError, TableWarning
from liger_registry.problem import Problem
from liger_registry.store import TableStore, read_file, write_file
from liger_registry.table import Choice, Provenance, Sample, Stored, Table

needs_posix = pytest.mark.skipif(os.name == "nt", reason="permissions, links and pipes of POSIX")
OP = "rms_norm"
PROVENANCE = Provenance("3.6", "0123456789ab", date="2025-06-07T08:09:10Z")


@dataclass(frozen=True)
class Place:
    directory: tuple[str, str, str] = ("cuda", "sm_90", "h200-132")
    fields: dict[str, Any] = field(default_factory=lambda: {"vendor": "cuda", "sku": "h200", "units": 132, "index": 3})

    def to_json(self) -> dict[str, Any]:
        return dict(self.fields)


DEVICE = Place()


def problem(rows: int = 1024, op: str = OP) -> Problem:
    return Problem(op, "default", "forward", Fields(hidden=4096, rows=rows), Fields(x="bfloat16"), Fields())


def stored(rows: int = 1024, time_us: float = 12.5, op: str = OP) -> Stored:
    choice = Choice("cuda:persistent", Config(block_rows=4))
    return Stored(problem(rows, op), choice, time_us, choice, 14.0, 0.01, "cuda-events-1", PROVENANCE)


def sample(rows: int = 1024, block_rows: int = 4, time_us: float = 12.5) -> Sample:
    choice = Choice("cuda:persistent", Config(block_rows=block_rows))
    return Sample(problem(rows), choice, "ok", time_us, 0, "", "cuda-events-1", PROVENANCE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def path(root: Path) -> Path:
    """Where the table of DEVICE and OP lies; its directory is there."""
    found = root / "v1" / "cuda" / "sm_90" / "h200-132" / "rms_norm.json"
    found.parent.mkdir(parents=True, mode=0o755)
    return found


def text(*entries: Stored) -> str:
    """A document without a digest, which tests may edit."""
    return render(Table(DEVICE.directory, OP, {}).merged(entries), seal=False)


def rows(table: Table) -> list[int]:
    return sorted(stored.problem.rows for stored in table.decisions.values())


@contextmanager
def noted() -> Iterator[list[str]]:
    """The warnings of a block, which must all be about tables."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    assert all(w.category is TableWarning for w in caught)
    messages += [str(w.message) for w in caught]


# -- the usual case --------------------------------------------------------------------------------------------------


def test_what_was_recorded_is_found_by_another_store(root: Path):
    writer = TableStore(root)
    writer.record(DEVICE, OP, [stored()], [sample()])
    writer.record(DEVICE, OP, samples=[sample(block_rows=8)])
    for reader in (writer, TableStore(root), TableStore(str(root), readonly=True, trusted=True)):
        found = reader.load(DEVICE, OP)
        assert found.decision(problem()) == stored()
        assert len(found.samples) == 2
        assert found.device == {"vendor": "cuda", "sku": "h200", "units": 132}
        assert reader.load(DEVICE.directory, OP) is found


def test_the_layout(root: Path):
    previous = os.umask(0)
    try:
        TableStore(root).record(DEVICE, OP, [stored()])
    finally:
        os.umask(previous)
    path = root / "v1" / "cuda" / "sm_90" / "h200-132" / "rms_norm.json"
    assert TableStore(root).path(DEVICE, OP) == path
    assert {p.name for p in path.parent.iterdir()} == {"rms_norm.json", "rms_norm.json.lock"}
    if os.name != "nt":
        for place in path.parents[:5]:
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_there(root: Path):
    reader = TableStore(root)
    assert not reader.load(DEVICE, OP)
    assert (reader.devices(), reader.ops(DEVICE), reader.siblings(DEVICE, OP)) == ([], [], [])
    reader.record(DEVICE, OP)
    assert not root.exists()


def test_devices_ops_and_siblings(root: Path):
    writer = TableStore(root)
    other, foreign = Place(("cuda", "sm_90", "h100-sxm-132")), Place(("rocm", "gfx942", "mi300x-304"))
    writer.record(DEVICE, OP, [stored(1)])
    writer.record(other, OP, [stored(2)])
    writer.record(other, "layer_norm", [stored(op="layer_norm")])
    writer.record(foreign, OP, [stored(3)])
    (root / "v1" / "cuda" / "stray").write_text("")
    (root / "v1" / "cuda" / "sm_90" / "h20-78").mkdir()
    assert writer.devices() == [
        ("cuda", "sm_90", "h100-sxm-132"),
        ("cuda", "sm_90", "h20-78"),
        DEVICE.directory,
        foreign.directory,
    ]
    assert writer.ops(other) == ["layer_norm", "rms_norm"]
    assert [t.directory for t in writer.siblings(DEVICE, OP)] == [other.directory]
    assert writer.siblings(foreign, OP) == []


def test_a_load_of_an_unchanged_file_does_not_open_it(root: Path, monkeypatch: pytest.MonkeyPatch):
    TableStore(root).record(DEVICE, OP, [stored(1)])
    reader = TableStore(root)
    first = reader.load(DEVICE, OP)
    TableStore(root).record(DEVICE, OP, [stored(2)])
    second = reader.load(DEVICE, OP)
    assert (rows(first), rows(second)) == ([1], [1, 2])
    monkeypatch.setattr(store, "read_bytes", None)
    assert reader.load(DEVICE, OP) is second
    reader.path(DEVICE, OP).unlink()
    assert rows(reader.load(DEVICE, OP)) == []


def test_a_writer_sees_what_others_wrote_even_if_the_file_looks_the_same(root: Path, monkeypatch: pytest.MonkeyPatch):
    # Same inode number, size and a time in whole seconds: what a coarse file system may show of two versions.
    monkeypatch.setattr(store, "_signature", lambda status: (1, 1, 1, 1_700_000_000 * 10**9))
    one, two = TableStore(root), TableStore(root)
    one.record(DEVICE, OP, [stored(1)])
    two.record(DEVICE, OP, [stored(2)])
    one.record(DEVICE, OP, [stored(3)])
    assert rows(read_file(one.path(DEVICE, OP))) == [1, 2, 3]


@pytest.mark.parametrize("op", ["../x", "a/b", ".x", "", "x\0y"])
def test_names_that_leave_the_layout(root: Path, op: str):
    with pytest.raises(TableInvalidError):
        TableStore(root).record(DEVICE, op, [stored(op=op)])
    with pytest.warns(TableWarning):
        assert not TableStore(root).load(DEVICE, op)
    assert not root.exists()


def test_an_entry_of_another_operation_and_one_that_no_table_holds(root: Path):
    for entry in (stored(op="layer_norm"), stored(time_us=float("nan"))):
        with pytest.raises(TableInvalidError):
            TableStore(root).record(DEVICE, OP, [stored(), entry])
    assert not root.exists()


def test_threads(root: Path):
    writer = TableStore(root)
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for k in range(6):
                writer.record(DEVICE, OP, [stored(100 * n + k + 1)])
                assert writer.load(DEVICE, OP).decision(problem(100 * n + k + 1)) is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(read_file(writer.path(DEVICE, OP)).decisions) == 24


# -- several processes -----------------------------------------------------------------------------------------------

# A writer: records one entry after another and acknowledges each once it is recorded.
WRITER = """
import itertools, sys
from liger_registry.config import Config, Fields
from liger_registry.problem import Problem
from liger_registry.store import TableStore
from liger_registry.table import Choice, Provenance, Sample, Stored

class Place:
    directory = ("cuda", "sm_90", "h200-132")
    def to_json(self):
        return {"vendor": "cuda"}

store, first, count = TableStore(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
choice = Choice("cuda:persistent", Config(block_rows=4))
for rows in range(first, first + count):
    problem = Problem("rms_norm", "default", "forward", Fields(rows=rows), Fields(x="bfloat16"), Fields())
    rest = ("cuda-events-1", Provenance("3.6", "0123456789ab"))
    store.record(Place(), "rms_norm", [Stored(problem, choice, 1.0, choice, 1.0, 0.0, *rest)],
                 [Sample(problem, choice, "ok", 1.0, 0, "", *rest)])
    sys.stdout.write(f"{rows}\\n")
    sys.stdout.flush()
assert not {"torch", "triton"} & set(sys.modules)
"""


def writer(root: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", WRITER, str(root), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_eight_processes_lose_nothing(root: Path):
    processes = [writer(root, 1000 * n + 1, 25) for n in range(8)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    found = read_file(TableStore(root).path(DEVICE, OP))
    assert rows(found) == [1000 * n + 1 + k for n in range(8) for k in range(25)]
    assert len(found.samples) == 200
    assert found.skipped == ()
    assert {p.suffix for p in TableStore(root).path(DEVICE, OP).parent.iterdir()} == {".json", ".lock"}


@needs_posix
def test_a_killed_writer_leaves_every_acknowledged_entry(root: Path):
    path = TableStore(root).path(DEVICE, OP)
    acknowledged: set[int] = set()
    chance = random.Random(7)
    for attempt in range(20):
        with writer(root, 10_000 * attempt + 1, 9_000) as process:
            assert process.stdout is not None
            acknowledged.add(int(process.stdout.readline()))
            time.sleep(chance.uniform(0, 0.04))
            process.send_signal(signal.SIGKILL)
            acknowledged.update(int(line) for line in process.stdout if line.endswith("\n"))
        found = read_file(path)
        assert found.skipped == ()
        assert acknowledged <= set(rows(found))
        # The one that was under way may be there too, without having been acknowledged.
        assert len(found.decisions) - len(acknowledged) <= attempt + 1
    assert not list(path.parent.glob("*.bad*"))
    TableStore(root).record(DEVICE, OP, [stored(5)])
    assert 5 in rows(read_file(path))


@needs_posix
def test_what_killed_writers_left_is_cleared_once_it_is_old(path: Path):
    old, new, other = (path.parent / name for name in (".rms_norm.json.a.tmp", ".rms_norm.json.b.tmp", ".x.json.a.tmp"))
    for leftover in (old, new, other):
        leftover.write_text("half")
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    TableStore(path.parents[4]).record(DEVICE, OP, [stored()])
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


# -- damage ----------------------------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("kept")


def make_link_outside(path: Path) -> None:
    target = path.parents[5] / "outside.json"
    target.write_text(text(stored(666)))
    path.symlink_to(target)


DAMAGE = {
    "empty": b"",
    "truncated": text(stored()).encode()[:-30],
    "binary": bytes(range(256)) * 40,
    "bom": b"\xef\xbb\xbf" + text(stored()).encode(),
    "nan": text(stored()).replace("12.5", "NaN").encode(),
    "duplicate key": text(stored()).replace('"op"', '"schema": 1, "op"').encode(),
    "deep": b"[" * 500_000,
    "long int": b'{"schema": ' + b"9" * 100_000 + b"}",
    "surrogate": text(stored()).replace('"op": "rms_norm"', '"op": "\\ud800"').encode(),
    "older schema": text(stored()).replace('"schema": 1', '"schema": 0').encode(),
    "another device": text(stored()).replace("h200-132", "h100-132").encode(),
    "too big": b" " * 5000,
    "directory": make_directory,
    "link outside": make_link_outside,
    "pipe": lambda path: os.mkfifo(path),
}


@needs_posix
@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "readonly"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_and_one_warning(path: Path, damage: str, readonly: bool, monkeypatch: pytest.MonkeyPatch):
    root, kind = path.parents[4], DAMAGE[damage]
    if damage == "too big":
        monkeypatch.setattr(store, "MAX_BYTES", 4096)
    if isinstance(kind, bytes):
        path.write_bytes(kind)
        path.chmod(0o644)
    else:
        kind(path)
    reader = TableStore(root, readonly, trusted=True)
    with noted() as caught:
        assert not reader.load(DEVICE, OP)
        assert not reader.load(DEVICE, OP)
        assert not TableStore(root, readonly, trusted=True).load(DEVICE, OP)
    assert len(caught) == 1
    caught[0].encode()
    names = {p.name for p in path.parent.iterdir()}
    if readonly:
        assert names == {"rms_norm.json"}
        return
    assert names == {"rms_norm.json.bad", "rms_norm.json.lock"}
    monkeypatch.undo()
    # The run goes on: what it measures is kept again.
    reader.record(DEVICE, OP, [stored(7)])
    assert rows(TableStore(root).load(DEVICE, OP)) == [7]


@needs_posix
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_writer_sets_damage_aside_too(path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    kind = DAMAGE[damage]
    if damage == "too big":
        monkeypatch.setattr(store, "MAX_BYTES", 4096)
    if isinstance(kind, bytes):
        path.write_bytes(kind)
    else:
        kind(path)
    with pytest.warns(TableWarning, match=r"set aside as rms_norm\.json\.bad") as caught:
        TableStore(path.parents[4]).record(DEVICE, OP, [stored(7)])
    assert len(caught) == 1
    assert rows(read_file(path)) == [7]
    assert os.path.lexists(f"{path}.bad")
    outside = path.parents[5] / "outside.json"
    assert not outside.exists() or rows(read_file(outside)) == [666]


@needs_posix
def test_set_aside_files_do_not_pile_up(path: Path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(store.KEPT_BAD + 3):
            path.write_text(f"bad {n}")
            assert not TableStore(path.parents[4]).load(DEVICE, OP)
    assert len(caught) == 1
    kept = sorted(path.parent.glob("*.bad*"))
    assert len(kept) == store.KEPT_BAD
    assert kept[0].read_text() == "bad 0"


@needs_posix
def test_what_another_process_repaired_is_not_set_aside(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.write_text("bad")
    root, real = path.parents[4], store.read_bytes

    def repaired_meanwhile(place: Path):
        found = real(place)
        monkeypatch.undo()
        path.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TableStore(root).record(DEVICE, OP, [stored(1)])
        return found

    monkeypatch.setattr(store, "read_bytes", repaired_meanwhile)
    reader = TableStore(root)
    with pytest.warns(TableWarning):
        assert not reader.load(DEVICE, OP)
    assert not list(path.parent.glob("*.bad*"))
    assert rows(reader.load(DEVICE, OP)) == [1]


def test_what_could_not_be_set_aside_at_once_is_not_overwritten(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.write_text("bad")
    user = TableStore(path.parents[4])
    with noted() as caught, monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing(os.replace, errno.EIO))
        assert not user.load(DEVICE, OP)
    assert "set aside" not in caught[0]
    user.record(DEVICE, OP, [stored(1)])
    assert Path(f"{path}.bad").read_text() == "bad"
    assert rows(read_file(path)) == [1]


def test_invalid_entries_are_left_out_with_one_warning(path: Path):
    content = json.loads(text(stored(1), stored(2)))
    content["decisions"][0]["dims"] = {"rows": [1]}
    path.write_text(json.dumps(content))
    reader = TableStore(path.parents[4])
    with noted() as caught:
        assert rows(reader.load(DEVICE, OP)) == [2]
        assert rows(TableStore(path.parents[4]).load(DEVICE, OP)) == [2]
    assert len(caught) == 1
    reader.record(DEVICE, OP, [stored(3)])
    assert rows(reader.load(DEVICE, OP)) == [2, 3]
    assert read_file(path).skipped == ()


@pytest.mark.parametrize("first", ["load", "record"])
def test_a_newer_schema_is_not_touched(path: Path, first: str):
    newer = '{"schema": 2, "anything": ["else"]}'
    path.write_text(newer)
    user = TableStore(path.parents[4])
    with noted() as caught:
        if first == "load":
            assert not user.load(DEVICE, OP)
        user.record(DEVICE, OP, [stored(1)])
        user.record(DEVICE, OP, [stored(2)])
        assert rows(user.load(DEVICE, OP)) == [1, 2]
    assert len(caught) == 1
    assert "stay in memory" in caught[0]
    assert path.read_text() == newer
    assert not list(path.parent.glob("*.bad*"))


@needs_posix
def test_a_directory_that_leads_out_of_the_root(path: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    path.parent.rename(outside)
    (outside / path.name).write_text(text(stored(666)))
    path.parent.symlink_to(outside)
    user = TableStore(path.parents[4])
    with noted() as caught:
        assert not user.load(DEVICE, OP)
        user.record(DEVICE, OP, [stored(1)])
        assert rows(user.load(DEVICE, OP)) == [1]
    assert len(caught) == 2
    assert all("leads out of" in message for message in caught)
    assert {p.name for p in outside.iterdir()} == {path.name}
    assert rows(read_file(outside / path.name)) == [666]


@needs_posix
def test_links_within_the_root_and_a_linked_root_are_fine(path: Path, tmp_path: Path):
    root = path.parents[4]
    path.write_text(text(stored(1)))
    path.parent.with_name("h100-132").symlink_to(path.parent)
    linked = tmp_path / "linked"
    linked.symlink_to(root)
    user = TableStore(linked)
    assert rows(user.load(DEVICE, OP)) == [1]
    user.record(DEVICE, OP, [stored(2)])
    assert rows(TableStore(root).load(DEVICE, OP)) == [1, 2]


# -- directories that cannot be written ------------------------------------------------------------------------------


def failing(real, code: int, when=lambda *args, **kwargs: True):
    def call(*args, **kwargs):
        if when(*args, **kwargs):
            raise OSError(code, os.strerror(code), str(args[0]))
        return real(*args, **kwargs)

    return call


def writes(path, flags=0, *rest, **kwargs) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "replace", "fsync", "mkdir"])
def test_an_unwritable_directory_keeps_results_in_memory(
    root: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
):
    TableStore(root).record(DEVICE, OP, [stored(1)])
    user = TableStore(root, lock_timeout_s=0.2)
    op = "other" if call == "mkdir" else OP
    place = Place(("cuda", "sm_80", "a100-80-108")) if call == "mkdir" else DEVICE
    with monkeypatch.context() as patched, noted() as caught:
        patched.setattr(os, call, failing(getattr(os, call), code, writes if call == "open" else lambda *a, **k: True))
        user.record(place, op, [stored(2, op=op)], [replace(sample(2), problem=problem(2, op))])
        user.record(place, op, [stored(3, op=op)])
        assert rows(user.load(place, op)) == ([2, 3] if call == "mkdir" else [1, 2, 3])
    assert len(caught) == 1
    assert "stay in memory" in caught[0]
    assert rows(TableStore(root).load(DEVICE, OP)) == [1]
    leftovers = [p.name for p in (root / "v1" / "cuda" / "sm_90" / "h200-132").iterdir()]
    assert sorted(leftovers) == ["rms_norm.json", "rms_norm.json.lock"]
    # Once it can be written again, nothing was lost.
    user.record(place, op, [stored(4, op=op)])
    assert set(rows(TableStore(root).load(place, op))) >= {2, 3, 4}
    assert len(read_file(user.path(place, op)).samples) == 1
    assert user._unsaved == {}


@pytest.mark.parametrize("place", ["", "v1", "v1/cuda", "v1/cuda/sm_90/h200-132"])
def test_a_file_in_a_directorys_place(root: Path, place: str):
    blocked = root / place
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("a file")
    user = TableStore(root)
    assert not user.load(DEVICE, OP)
    with noted() as caught:
        user.record(DEVICE, OP, [stored(1)])
        user.record(DEVICE, OP, [stored(2)])
    assert len(caught) == 1
    assert rows(user.load(DEVICE, OP)) == [1, 2]
    assert blocked.read_text() == "a file"


def test_a_file_that_cannot_be_read_is_not_overwritten(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.write_text(text(stored(1)))
    user = TableStore(path.parents[4])
    with monkeypatch.context() as patched, noted() as caught:
        patched.setattr(os, "open", failing(os.open, errno.EACCES, lambda name, *a, **k: str(name) == str(path)))
        assert not user.load(DEVICE, OP)
        user.record(DEVICE, OP, [stored(2)])
        assert rows(user.load(DEVICE, OP)) == [2]
    assert len(caught) == 2  # cannot be read, cannot be written
    assert rows(user.load(DEVICE, OP)) == [1, 2]
    assert rows(read_file(path)) == [1]


def test_a_lock_that_is_not_given_back(path: Path):
    user = TableStore(path.parents[4], lock_timeout_s=0.1)
    with filelock.FileLock(f"{path}.lock"), noted() as caught:
        # Another thread, because a lock is not taken twice by one.
        thread = threading.Thread(target=user.record, args=(DEVICE, OP, [stored(1)]))
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert rows(user.load(DEVICE, OP)) == [1]
    assert not path.exists()
    user.record(DEVICE, OP, [stored(2)])
    assert rows(read_file(path)) == [1, 2]


def test_once_a_write_failed_later_ones_do_not_wait_long(path: Path, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    real = store._locked
    monkeypatch.setattr(store, "_locked", lambda place, timeout_s: waits.append(timeout_s) or real(place, timeout_s))
    user = TableStore(path.parents[4], lock_timeout_s=7.0)
    with monkeypatch.context() as patched, noted() as caught:
        patched.setattr(os, "replace", failing(os.replace, errno.EIO))
        for n in range(1, 4):
            user.record(DEVICE, OP, [stored(n)])
    assert len(caught) == 1
    user.record(DEVICE, OP, [stored(4)])
    user.record(DEVICE, OP, [stored(5)])
    assert waits == [7.0, 1.0, 1.0, 1.0, 7.0]
    assert rows(read_file(path)) == [1, 2, 3, 4, 5]


def test_warnings_that_are_errors_lose_nothing(path: Path):
    path.write_text("bad")
    user = TableStore(path.parents[4])
    with pytest.raises(TableWarning):
        user.record(DEVICE, OP, [stored(1)])
    assert rows(read_file(path)) == [1]


# -- read-only paths -------------------------------------------------------------------------------------------------


@needs_posix
def test_a_readonly_path_is_only_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.write_text(text(stored(1)))
    path.chmod(0o644)
    root = path.parents[4]
    for place in (root, *path.parents[:4]):
        place.chmod(0o755)
    before = sorted(root.rglob("*"))
    for name in ("replace", "rename", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, failing(getattr(os, name), errno.EROFS))
    monkeypatch.setattr(os, "open", failing(os.open, errno.EROFS, writes))
    reader = TableStore(root, readonly=True)
    assert rows(reader.load(DEVICE, OP)) == [1]
    with pytest.raises(TableError, match="read-only"):
        reader.record(DEVICE, OP, [stored(2)])
    assert rows(reader.load(DEVICE, OP)) == [1]
    assert sorted(root.rglob("*")) == before


@needs_posix
@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("depth", range(6), ids=["file", "unit", "arch", "vendor", "v1", "root"])
def test_a_readonly_path_that_others_can_write_to_is_refused(path: Path, depth: int, mode: int):
    root = path.parents[4]
    places = [path, *path.parents[:5]]
    for name in (OP, "layer_norm"):
        path.with_name(f"{name}.json").write_text(text(stored(1)).replace(OP, name))
        path.with_name(f"{name}.json").chmod(0o644)
    for place in places[1:]:
        place.chmod(0o755)
    places[depth].chmod(places[depth].stat().st_mode | mode)
    reader = TableStore(root, readonly=True)
    with noted() as caught:
        assert not reader.load(DEVICE, OP)
        assert not reader.load(DEVICE, OP)
        assert bool(reader.load(DEVICE, "layer_norm")) == (depth == 0)
    assert len(caught) == 1
    assert f"others can write to {places[depth]};" in caught[0]
    # A package's own directory is as trusted as its code, and the user's cache is the user's.
    assert rows(TableStore(root, readonly=True, trusted=True).load(DEVICE, OP)) == [1]
    assert rows(TableStore(root).load(DEVICE, OP)) == [1]
    places[depth].chmod(places[depth].stat().st_mode & ~mode)
    assert rows(reader.load(DEVICE, OP)) == [1]


@needs_posix
def test_a_readonly_path_of_another_user_or_in_a_directory_of_all_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    root, real = path.parents[4], os.stat
    path.write_text(text(stored(1)))
    path.chmod(0o644)
    for place in (root, root.parent, *path.parents[:4]):
        place.chmod(0o755)

    def foreign(place, *rest, **kwargs):
        status = real(place, *rest, **kwargs)
        is_root = os.path.realpath(place) == str(root)
        return os.stat_result([54321 if is_root and n == 4 else value for n, value in enumerate(status)])

    with monkeypatch.context() as patched, noted() as caught:
        patched.setattr(os, "stat", foreign)
        assert not TableStore(root, readonly=True).load(DEVICE, OP)
        assert rows(TableStore(root, readonly=True, trusted=True).load(DEVICE, OP)) == [1]
        assert rows(TableStore(root).load(DEVICE, OP)) == [1]
    assert len(caught) == 1
    assert "user 54321 can write to" in caught[0]
    root.parent.chmod(0o777)
    with noted() as caught:
        assert not TableStore(root, readonly=True).load(DEVICE, OP)
    assert len(caught) == 1
    root.parent.chmod(0o1777)
    assert rows(TableStore(root, readonly=True).load(DEVICE, OP)) == [1]


# -- single files ----------------------------------------------------------------------------------------------------


def test_files_anywhere(tmp_path: Path):
    table = Table(DEVICE.directory, OP, {"vendor": "cuda"}).merged([stored()], [sample()])
    write_file(tmp_path / "any name.txt", table, mode=0o644)
    assert read_file(tmp_path / "any name.txt") == table
    assert parse((tmp_path / "any name.txt").read_bytes()) == table
    assert [p.name for p in tmp_path.iterdir()] == ["any name.txt"]
    if os.name != "nt":
        assert stat.S_IMODE((tmp_path / "any name.txt").stat().st_mode) == 0o644


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(TableError, match="cannot be read") as caught:
        read_file(tmp_path / "missing.json")
    assert "FileNotFoundError" in str(caught.value)
    with pytest.raises(TableError, match="cannot be written"):
        write_file(tmp_path / "missing" / "x.json", Table(DEVICE.directory, OP))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(TableInvalidError, match="JSON"):
        read_file(tmp_path / "bad.json")
    with pytest.raises(TableInvalidError, match="regular"):
        read_file(tmp_path)
    assert document.SCHEMA == 1
