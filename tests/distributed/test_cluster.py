"""A job of 1,024 ranks that starts on one shared file system: what all of them read, lock and write, by count.

Each rank is a registry of its own, with the stores that it has in a job; they run in threads, as many at a time as a
node has ranks. What is counted is what the code of a job asks of the file system. A remote file system answers a look
(``stat``) or an open in about a millisecond: the counts bound the time.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from liger_registry import Device, Registry, locking
from liger_registry.implementation import source_hash
from liger_registry.settings import Settings
from liger_registry.store import TableStore
from liger_registry.table import Provenance, Stored

pytestmark = pytest.mark.ci

RANKS, NODE = 1024, 8
CPU = Device.parse("cpu")


class Traffic(Counter[str]):
    """Looks, opened files, bytes that were read, writes and locks below one directory, over all threads."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.lock = os.fspath(root), threading.Lock()

    def note(self, what: str, path: object, amount: int = 1) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root):
            with self.lock:
                self[what] += amount


@contextmanager
def watched(root: Path, monkeypatch: pytest.MonkeyPatch):
    """What is asked of the file system below a directory."""
    traffic = Traffic(root)
    stat, opened, lock = os.stat, os.open, locking._lock

    def look(path, *args, **kwargs):
        traffic.note("looks", path)
        return stat(path, *args, **kwargs)

    def open_file(path, flags, *args, **kwargs):
        try:
            found = opened(path, flags, *args, **kwargs)
        except OSError:
            traffic.note("looks", path)
            raise
        if flags & (os.O_WRONLY | os.O_RDWR):
            traffic.note("writes", path)
        else:
            traffic.note("reads", path)
            traffic.note("bytes", path, os.fstat(found).st_size)
        return found

    def take(path, *args, **kwargs):
        traffic.note("locks", path)
        return lock(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", look)
        patch.setattr(os, "open", open_file)
        patch.setattr(locking, "_lock", take)
        yield traffic


def step(registry: Registry) -> None:
    """A few calls of a model's step."""
    for rows, width in ((3, 64), (40, 64), (3, 128)):
        x, weight = torch.zeros(rows, width, requires_grad=True), torch.ones(width, requires_grad=True)
        registry.get("rms_norm")(x, weight).sum().backward()
        registry.get("swiglu")(x, x.clone()).sum().backward()


@pytest.fixture(scope="module")
def model():
    """A catalogue, what a step asks of it, and what is decided without a table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = Registry(Settings(cache_dir=Path(os.environ["LIGER_TUNE_CACHE_DIR"]) / "none"))
        step(registry)
        problems = registry._called(CPU)
        return registry.catalog, {problem: registry.decide(problem, CPU) for problem in problems}


def fill(root: Path, decisions) -> list[Path]:
    """Tables with an answer for each problem."""
    store, paths = TableStore(root), []
    for op in sorted({problem.op for problem in decisions}):
        entries = []
        for problem, decision in decisions.items():
            if problem.op == op:
                provenance = Provenance("none", source_hash(decision.implementation.launch))
                choice = decision.choice
                entries.append(Stored(problem, choice, 1.0, choice, 2.0, 0.01, CPU.protocol, provenance))
        store.record(CPU, op, entries)
        paths.append(store.path(CPU, op))
    return paths


def start(model, settings: Settings) -> list[Registry]:
    """All ranks decide what a step asks; the registries, to go on with."""
    catalog, decisions = model
    made: list[Registry] = []

    def one(rank: int) -> None:
        registry = Registry(settings, catalog)
        for problem in decisions:
            registry.decide(problem, CPU)
        made.append(registry)

    with ThreadPoolExecutor(NODE) as threads:
        list(threads.map(one, range(RANKS)))
    return made


def test_a_warm_start_reads_each_table_once_a_rank(model, tmp_path, monkeypatch):
    _, decisions = model
    paths = fill(tmp_path, decisions)
    assert {p.op for p in decisions} == {"rms_norm", "swiglu"}
    assert len(decisions) >= 10
    size = sum(path.stat().st_size for path in paths)
    with watched(tmp_path, monkeypatch) as traffic:
        ranks = start(model, Settings(cache_dir=tmp_path))
        sources = {registry.decide(problem, CPU).source for registry in ranks for problem in decisions}
    assert sources == {"exact"}
    assert traffic["locks"] == traffic["writes"] == 0, "a rank that starts writes nothing, and waits for nobody"
    assert traffic["reads"] == RANKS * len(paths)
    assert traffic["bytes"] == RANKS * size
    # One look a problem at most, and a few a table: a second at a thousand a second, for each rank by itself.
    assert traffic["looks"] <= RANKS * (len(decisions) + 8 * len(paths))
    with watched(tmp_path, monkeypatch) as traffic:
        for registry in ranks[:NODE]:
            for problem in decisions:
                registry.decide(problem, CPU)
    assert traffic == {}, "what was decided asks nothing any more"


def test_a_cold_start_looks_and_writes_each_miss_about_once(model, tmp_path, monkeypatch):
    _, decisions = model
    with watched(tmp_path, monkeypatch) as traffic:
        start(model, Settings(cache_dir=tmp_path))
    assert traffic["locks"] == 0
    log = next(tmp_path.rglob("misses*"))
    lines = log.read_text().splitlines()
    assert len(set(lines)) == len(decisions)
    # Ranks that miss in the same instant may each write it; those that come later see that it is there.
    assert len(lines) <= NODE * len(decisions)
    assert traffic["writes"] <= NODE * len(decisions)
    assert traffic["reads"] <= RANKS * (1 + len(decisions))
    assert traffic["bytes"] <= RANKS * (1 + len(decisions)) * log.stat().st_size
    assert traffic["looks"] <= RANKS * 8 * len(decisions)


@pytest.mark.slow
def test_tables_in_the_image_leave_the_shared_file_system_alone(model, tmp_path, monkeypatch):
    _, decisions = model
    shared, image = tmp_path / "shared", tmp_path / "image"
    paths = fill(image, decisions)
    for directory in (image, *image.rglob("*")):
        directory.chmod(0o700 if directory.is_dir() else 0o600)
    with watched(shared, monkeypatch) as traffic, watched(image, monkeypatch) as local:
        ranks = start(model, Settings(cache_dir=shared, table_dirs=(image,)))
        assert {registry.decide(p, CPU).source for registry in ranks[:3] for p in decisions} == {"exact"}
    # A look for a table of the user's own before each decision, and nothing else.
    assert traffic["reads"] == traffic["bytes"] == traffic["locks"] == traffic["writes"] == 0
    assert traffic["looks"] <= RANKS * 2 * len(decisions)
    assert local["reads"] == RANKS * len(paths)


def test_one_writer_a_node_locks_once_a_table_and_loses_nothing(model, tmp_path, monkeypatch):
    """Rank 0 of each of 128 nodes writes what it measured, all at once, into the same tables."""
    _, decisions = model
    nodes = RANKS // NODE
    ops = sorted({problem.op for problem in decisions})
    shares = [dict(list(decisions.items())[n % len(decisions) :][:1]) for n in range(nodes)]
    with watched(tmp_path, monkeypatch) as traffic, ThreadPoolExecutor(NODE) as threads:
        list(threads.map(lambda share: fill(tmp_path, share), shares))
    assert traffic["locks"] == nodes
    assert traffic["reads"] <= 2 * nodes  # the table that is merged into, and the directory that is flushed
    found = [problem for op in ops for problem, _ in TableStore(tmp_path).load(CPU, op).decisions]
    assert set(found) == set(decisions)
