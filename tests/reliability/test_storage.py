"""Processes that write, read, die and meet faults on one cache directory; no entry that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from processes import LIMIT_S, Child, acknowledged, check, remount, small_disk, start
from storage_child import Place, entries, problem

from liger_registry import store as stores
from liger_registry.store import TableStore, read_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and locks of POSIX")

FULL = ["ENOSPC", "EDQUOT", "EIO"]
READ_ONLY = {"open": ["EROFS"], "mkdir": ["EROFS"], "replace": ["EROFS"], "unlink": ["EROFS"]}
FAULTS = {
    "open": {"open": ["EACCES", "EMFILE", "ENOSPC", "ESTALE"]},
    "write": {"write": FULL},
    "short": {"short": FULL},
    "fsync": {"fsync": FULL},
    "replace": {"replace": ["EACCES", "EIO", "ENOSPC", "EXDEV"]},
    "lock": {"lock": ["EIO", "EBADF", "EINTR"]},
    "mkdir": {"mkdir": ["EACCES", "ENOSPC"]},
    "times": {"utime": ["EPERM"]},
    "stat": {"stat": ["EIO", "ESTALE"]},
    "unlink": {"write": FULL, "unlink": ["EACCES"]},
}
EVERY = {call: errors for plan in FAULTS.values() for call, errors in plan.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def rates(children: list[Child]) -> str:
    longest = max((float(s[0]) for c in children for s in c.said("longest")), default=0.0)
    return f"{sum(map(len, acknowledged(children).values()))} entries, the longest wait {longest:.2f} s"


def torture(out: Path, root: Path, seconds: float, writers: list[dict], readers: int, seed: int) -> list[Child]:
    """Writers, each of which is killed at random moments and started again, and readers beside them."""
    chance, numbers = random.Random(seed), count(1)
    end = time.monotonic() + seconds

    def writer(options: dict) -> Child:
        return start(out, "write", root, first=next(numbers) * 1_000_000, seconds=seconds, misses=True, **options)

    looking = [start(out, "read", root, seconds=seconds) for _ in range(readers)]
    running = [(writer(options), options) for options in writers]
    every = [child for child, _ in running]
    try:
        while time.monotonic() < end:
            time.sleep(chance.uniform(0, 0.4))
            position = chance.randrange(len(running))
            child, options = running[position]
            if not child.said("ack"):
                continue  # it has hardly begun
            child.kill()
            running[position] = (writer(options), options)
            every.append(running[position][0])
        for child, _ in running:
            child.wait()
        for child in looking:
            child.wait()
            assert int(child.said("looks")[0][0]) > 0
    finally:
        for child in [*every, *looking]:
            if child.process.poll() is None:  # only where something above has failed
                child.kill()
    return every


@pytest.mark.ci
def test_four_processes_are_killed_at_random(tmp_path: Path, root: Path):
    every = torture(tmp_path / "out", root, 6.0, [{}, {}, {"clock": "jump"}], 1, seed=1)
    assert len(every) > 3, "nobody was killed"
    assert check(root, every) > 0
    print(f"4 processes, {len(every) - 3} killed: {rates(every)}")


@pytest.mark.slow
def test_sixteen_processes_are_killed_at_random_for_a_minute(tmp_path: Path, root: Path):
    clocks = [{"clock": kind} for kind in ("backwards", "frozen", "jump")]
    faulty = [{"plan": EVERY, "chance": 0.05}, {"plan": {"lock": ["EIO"], "write": FULL}, "chance": 0.3}]
    every = torture(tmp_path / "out", root, 60.0, [*[{}] * 7, *clocks, *faulty], 4, seed=2)
    assert len(every) > 12, "nobody was killed"
    assert check(root, every) > 0
    print(f"16 processes, {len(every) - 12} killed: {rates(every)}")


@pytest.mark.parametrize("call", ["all", *(pytest.param(call, marks=pytest.mark.ci) for call in FAULTS)])
def test_every_call_may_fail(tmp_path: Path, root: Path, call: str):
    """At random, in one process; beside it another without faults."""
    options = {"count": 40, "misses": True, "ops": ["rms_norm"], "lock_timeout_s": 20.0}
    plan, chance = FAULTS.get(call, EVERY), {"all": 0.05, "stat": 0.05}.get(call, 0.3)
    faulty = start(tmp_path / "out", "write", root, first=1_000_000, plan=plan, chance=chance, **options)
    plain = start(tmp_path / "out", "write", root, first=2_000_000, **options)
    for child in (faulty, plain):
        child.wait()
    assert int(faulty.said("faults")[0][0]) > 0, "no fault was planted"
    assert not plain.said("kept")
    if call not in ("stat", "unlink", "mkdir"):  # these may hit where it does not matter
        # A failure keeps an entry from being acknowledged; a time that cannot be set does no harm.
        assert bool(faulty.said("kept")) is (call != "times")
    assert check(root, [faulty, plain]) == 80, "what stayed in memory was written once it could be"
    assert not list(root.rglob("*.tmp")) or "unlink" in plan


@pytest.mark.parametrize(
    "code", ["ENOLCK", *(pytest.param(code, marks=pytest.mark.ci) for code in ("EOPNOTSUPP", "ENOSYS"))]
)
def test_a_file_system_without_locks(tmp_path: Path, root: Path, code: str):
    """Processes of one machine are kept apart all the same."""
    plan = {"lock": [code]}
    children = [
        start(tmp_path / "out", "write", root, first=n * 1_000_000, count=15, plan=plan, chance=1.0, to_the_end=True)
        for n in range(1, 4)
    ]
    for child in children:
        child.wait()
        assert not child.said("kept")
    assert check(root, children) == 45


@pytest.mark.parametrize(
    "kind", ["frozen", *(pytest.param(kind, marks=pytest.mark.ci) for kind in ("backwards", "jump"))]
)
def test_clocks_that_go_backwards(tmp_path: Path, root: Path, kind: str):
    children = [
        start(tmp_path / "out", "write", root, first=n * 1_000_000, count=30, clock=kind, ops=["rms_norm"])
        for n in range(1, 4)
    ]
    for child in children:
        child.wait()
        assert not child.said("kept")
    assert check(root, children) == 90


def test_a_clock_that_stands_still_hides_no_version(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Not even where each version has the inode number and the size of the one before."""
    real = stores._signature
    monkeypatch.setattr(stores, "_signature", lambda status: (0, 0, 0, real(status)[3]))
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    one, two = TableStore(root), TableStore(root)
    for rows in range(1, 20):
        for store in (one, two):
            decision, _ = entries("rms_norm", rows)
            store.record(Place(), "rms_norm", [replace(decision, time_us=rows + (store is two))])
        assert one.load(Place(), "rms_norm").decision(problem("rms_norm", rows)).time_us == rows + 1
    assert len(read_file(one.path(Place(), "rms_norm")).decisions) == 19


@pytest.mark.parametrize("by", ["mount", pytest.param("shim", marks=pytest.mark.ci)])
def test_a_full_disk(tmp_path: Path, by: str):
    """A real one where mounting is permitted, else the calls fail as on one."""
    with small_disk(tmp_path / "disk") as disk:
        root = (disk if by == "mount" and disk else tmp_path) / "cache"
        before = start(tmp_path / "out", "write", root, first=1_000_000, count=5)
        before.wait()
        plan = None
        if by == "mount" and disk:
            fill(disk / "filler")
        else:
            plan = {"short": ["ENOSPC"], "mkdir": ["ENOSPC"]}
        full = start(
            tmp_path / "out", "write", root, first=2_000_000, count=9, plan=plan, chance=1.0, to_the_end=True,
            lock_timeout_s=5.0, misses=True,
        )  # fmt: skip
        full.wait()
        assert len(full.said("kept")) == 9
        assert not full.said("ack")
        (root.parent / "filler").unlink(missing_ok=True)
        after = start(tmp_path / "out", "write", root, first=3_000_000, count=5, misses=True)
        after.wait()
        assert check(root, [before, after]) == 10
        assert after.said("miss")
        assert not list(root.rglob("*.tmp"))


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while os.write(descriptor, b"x" * size):
                    pass
            except OSError:
                continue
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("by", ["mount", pytest.param("shim", marks=pytest.mark.ci)])
@pytest.mark.parametrize("when", [pytest.param("from the start", marks=pytest.mark.ci), "later"])
def test_a_read_only_directory(tmp_path: Path, by: str, when: str):
    with small_disk(tmp_path / "disk") as disk:
        mounted = by == "mount" and disk is not None
        root = (disk if mounted else tmp_path) / "cache"
        before = []
        if when == "later":
            before = [start(tmp_path / "out", "write", root, first=1_000_000, count=5)]
            before[0].wait()
        if mounted:
            remount(disk, "ro")
        plan = None if mounted else READ_ONLY
        child = start(
            tmp_path / "out", "write", root, first=2_000_000, count=9, plan=plan, chance=1.0, to_the_end=True,
            lock_timeout_s=5.0, misses=True,
        )  # fmt: skip
        child.wait()
        assert (len(child.said("kept")), child.said("ack"), child.said("miss")) == (9, [], [])
        if mounted:
            remount(disk, "rw")
        after = start(tmp_path / "out", "write", root, first=3_000_000, count=5)
        after.wait()
        assert check(root, [*before, after]) == 5 * (1 + len(before))


@pytest.mark.ci
def test_a_holder_of_the_lock_that_is_stopped(tmp_path: Path, root: Path):
    """Others wait no longer than their time limit, keep what they have, and write it when they can."""
    holder = start(tmp_path / "out", "write", root, first=1_000_000, ops=["rms_norm"])
    lock = f"{TableStore(root).path(('cuda', 'sm_90', 'h200-132'), 'rms_norm')}.lock"
    began = time.monotonic()
    while not held_while_stopped(holder, lock):
        assert time.monotonic() - began < LIMIT_S
    try:
        options = {"count": 4, "ops": ["rms_norm"], "lock_timeout_s": 0.3}
        waiting = start(tmp_path / "out", "write", root, first=2_000_000, **options)
        waiting.wait()
        assert len(waiting.said("kept")) == 4
    finally:
        holder.process.send_signal(signal.SIGCONT)
    while len(holder.said("ack")) < 3:
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)
    holder.kill()
    later = start(tmp_path / "out", "write", root, first=3_000_000, count=3)
    later.wait()
    assert check(root, [holder, later]) >= 6


def held_while_stopped(holder: Child, lock: str) -> bool:
    """Stop a process; whether it has the lock now. If not, it goes on."""
    import fcntl

    if not holder.said("ack"):
        time.sleep(0.01)
        return False
    holder.process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{holder.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    holder.process.send_signal(signal.SIGCONT)
    time.sleep(random.uniform(0, 0.01))
    return False
