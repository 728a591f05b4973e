"""Two versions of this package on one cache directory, and machines that lack what a lock or a table needs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from processes import check, start
from storage_child import OPS, Place, entries, problem

import liger_registry
from liger_registry import document
from liger_registry.errors import TableWarning, TuningBusyError, TuningWarning
from liger_registry.store import TableStore
from liger_registry.tuning.lock import device_lock

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")


def copy_of_the_package(at: Path, version: str, schema: int) -> Path:
    """A directory from which another version of this package is imported."""
    package = at / "liger_registry"
    shutil.copytree(Path(liger_registry.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "_version.py").write_text(f'__version__ = "{version}"\n')
    text = (package / "document.py").read_text()
    assert "\nSCHEMA = 1\n" in text
    (package / "document.py").write_text(text.replace("\nSCHEMA = 1\n", f"\nSCHEMA = {schema}\n"))
    return at


@pytest.mark.parametrize("schema", [pytest.param(1, marks=pytest.mark.ci), 2], ids=["one-schema", "two-schemas"])
def test_two_versions_side_by_side(tmp_path: Path, schema: int):
    root = tmp_path / "cache"
    other = copy_of_the_package(tmp_path / "other", "99.0.0", schema)
    options = {"count": 20, "ops": OPS, "misses": True}
    old = [start(tmp_path / "out", "write", root, first=n * 1_000_000, **options) for n in (1, 2)]
    new = start(tmp_path / "out", "write", root, package=other, first=3_000_000, **options)
    for child in (*old, new):
        child.wait()
        assert not child.said("kept")
    again = start(tmp_path / "out", "write", root, first=4_000_000, count=3)
    again.wait()
    # Of one schema both are in one table; of two each version has tables of its own, and finds all of them again.
    assert check(root, [*old, again, *([new] if schema == 1 else [])]) == 43 + (20 if schema == 1 else 0)
    assert not list(root.rglob("*.bad*"))
    tables = {path.relative_to(root).parts[0] for path in root.rglob("*.json")}
    assert tables == {"v1", f"v{schema}"}
    for path in root.glob(f"v{schema}/**/*.json"):
        assert json.loads(path.read_text())["schema"] == schema
    rows = {
        e["dims"]["rows"] for p in root.glob(f"v{schema}/**/*.json") for e in json.loads(p.read_text())["decisions"]
    }
    assert {int(n) for _, n in new.said("ack")} <= rows


def test_a_table_that_no_memory_is_left_for_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    decision, sample = entries("rope", 7)
    TableStore(tmp_path).record(Place(), "rope", [decision], [sample])

    def too_much(*args, **kwargs):
        raise MemoryError

    store, real = TableStore(tmp_path), json.loads
    monkeypatch.setattr(document.json, "loads", too_much)
    with pytest.warns(TableWarning, match="no memory"):
        assert not store.load(Place(), "rope")
    monkeypatch.setattr(document.json, "loads", real)
    assert store.load(Place(), "rope").decision(problem("rope", 7)) == decision


@pytest.mark.parametrize("what", ["no directory", "no locks", "held"])
def test_the_lock_of_a_device_that_cannot_be_had(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch):
    """Tuning goes on with a warning; another tuner alone is a reason not to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if what == "held":
        with device_lock("cpu") as path, path.open() as file:
            assert path.exists()
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        real = fcntl.flock
        monkeypatch.setattr(
            fcntl, "flock", lambda *args: failing(errno.EAGAIN) if args[1] & fcntl.LOCK_EX else real(*args)
        )
        with pytest.raises(TuningBusyError), device_lock("cpu", timeout_s=0.0):
            pass
        return
    if what == "no directory":
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(fcntl, "flock", lambda *args: failing(errno.ENOLCK))
    with (
        pytest.warns(TuningWarning, match="nothing keeps another tuner away"),
        device_lock("cpu", timeout_s=0.0) as path,
    ):
        assert path.name == "tuning-cpu.lock"


def failing(code: int):
    raise OSError(code, os.strerror(code))
