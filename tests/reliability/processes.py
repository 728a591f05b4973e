"""Starting processes of the storage tests, and what must hold when they are done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage_child import OPS, Place, problem

from liger_registry.misses import MissLog
from liger_registry.store import TableStore, read_file

HERE = Path(__file__).parent
#: No child of these tests takes longer than this unless it hangs.
LIMIT_S = 120


@dataclass
class Child:
    """A process, and the file its words go to, which outlives it."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def words(self) -> list[list[str]]:
        """What it said, line by line; a line that a kill cut short is left out."""
        return [line.split() for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def said(self, word: str) -> list[list[str]]:
        return [words[1:] for words in self.words() if words[0] == word]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def wait(self) -> None:
        """Wait for its end, which must be a good one."""
        assert self.process.wait(LIMIT_S) == 0, self.err.read_text()[-2000:]


def start(out: Path, role: str, root: Path, package: Path | None = None, **asked: object) -> Child:
    """A process of ``storage_child`` on a root; ``package`` holds another copy of ours."""
    out.mkdir(parents=True, exist_ok=True)
    name = out / f"{len(list(out.glob('*.out')))}"
    paths = [name.with_suffix(".out"), name.with_suffix(".err")]
    searched = [*([str(package)] if package else []), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(searched)}
    asked = {"role": role, "root": str(root), **asked}
    with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", str(HERE / "storage_child.py"), json.dumps(asked)],
            stdout=stdout, stderr=stderr, env=environment,
        )  # fmt: skip
    return Child(process, *paths)


def acknowledged(children: Iterable[Child]) -> dict[str, set[int]]:
    """The rows of each operation that children said are on the disk."""
    found: dict[str, set[int]] = {op: set() for op in OPS}
    for child in children:
        for op, rows in child.said("ack"):
            found[op].add(int(rows))
    return found


def check(root: Path, children: Iterable[Child]) -> int:
    """Every table parses whole, nothing was set aside, and each acknowledged entry is there; how many these are."""
    children, store, count = list(children), TableStore(root), 0
    for op, rows in acknowledged(children).items():
        path = store.path(Place(), op)
        if not rows:
            continue
        table = read_file(path)
        assert table.skipped == ()
        there = {p.rows for p, _ in table.decisions}
        assert rows <= there, f"{len(rows - there)} of {len(rows)} acknowledged entries of {op} are missing"
        assert rows <= {s.problem.rows for s in table.samples.values()} | there
        count += len(rows)
    assert not list(root.rglob("*.bad*"))
    logged = {p for _, p in MissLog(root / "misses.jsonl").all()}
    missed = {problem(op, int(rows)) for child in children for op, rows in child.said("miss")}
    assert missed <= logged, f"{len(missed - logged)} of {len(missed)} recorded misses are not in the log"
    return count


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    return sys.platform == "linux" and os.geteuid() == 0


@contextmanager
def small_disk(at: Path, size: str = "256k") -> Iterator[Path | None]:
    """A file system of its own, in memory; None where mounting is not permitted."""
    at.mkdir(parents=True)
    made = can_mount() and _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "liger", str(at))
    try:
        yield at if made else None
    finally:
        if made:
            assert _run("umount", str(at))


def remount(at: Path, how: str) -> None:
    """Make a mounted file system read-only (``ro``) or writable again (``rw``)."""
    assert _run("mount", "-o", f"remount,{how}", str(at))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
