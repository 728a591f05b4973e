"""The log of misses: what a real run asked for and no table answered, so that warmup can tune exactly that.

Each problem is written once, as one line appended in a single write, so that ranks on one file system need no lock and
a job that is killed loses nothing. The log is bounded; what does not fit is dropped, never an error.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import warnings
from pathlib import Path

from liger_registry.errors import TableInvalidError, TableWarning
from liger_registry.problem import Problem

# 4,096 problems are some fifty models; a line is about 250 bytes.
MOST, MOST_BYTES = 4096, 4 << 20


class MissLog:
    """Missed problems by device fingerprint, in memory and in one file.

    Args:
        path: the file; it and its directory are made on the first miss.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, Problem], None] | None = None
        self._read = 0  # bytes of the file, up to the end of a line
        self._lock = threading.Lock()
        self._warned = False

    def add(self, fingerprint: str, problem: Problem) -> None:
        """Record a miss; a second one of the same problem, or one too many, is dropped."""
        with self._lock:
            known = self._load()
            if (fingerprint, problem) in known or len(known) >= MOST:
                return
            # Another rank may have written it meanwhile: a thousand that miss the same would fill the log with it.
            self._look()
            if (fingerprint, problem) in known:
                return
            known[fingerprint, problem] = None
            line = json.dumps({"device": fingerprint, "op": problem.op, **problem.to_json()}, sort_keys=True)
            self._append(line + "\n")

    def all(self) -> list[tuple[str, Problem]]:
        """The recorded misses, oldest first, those of earlier runs included."""
        with self._lock:
            return list(self._load())

    def clear(self) -> None:
        """Forget all misses."""
        with self._lock:
            self._known, self._read = {}, 0
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                self._warn("cleared", error)

    def _load(self) -> dict[tuple[str, Problem], None]:
        if self._known is None:
            self._known = {}
            self._look()
        return self._known

    def _look(self) -> None:
        """Read what was appended since the last look."""
        known = self._known
        assert known is not None
        try:
            with open(self._open(os.O_RDONLY), "rb") as file:
                if os.fstat(file.fileno()).st_size < self._read:  # cleared by somebody
                    self._read = 0
                file.seek(self._read)
                text = file.read(max(0, MOST_BYTES - self._read))
        except OSError:
            return
        self._read += text.rfind(b"\n") + 1
        for line in text.decode("utf-8", "replace").splitlines()[:MOST]:
            try:
                entry = json.loads(line)
                known[str(entry["device"]), Problem.from_json(str(entry["op"]), entry)] = None
            except (ValueError, KeyError, TypeError, RecursionError, TableInvalidError):
                continue  # a line cut short by a full disk, or not ours

    def _append(self, line: str) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                if (size := os.fstat(descriptor).st_size) >= MOST_BYTES:
                    return
                # A full disk, or a kill, may have cut the last line short: what is glued to it would be lost too.
                if size and os.lseek(descriptor, size - 1, os.SEEK_SET) >= 0 and os.read(descriptor, 1) != b"\n":
                    line = f"\n{line}"
                if os.write(descriptor, line.encode()) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn("recorded", error)

    def _open(self, flags: int) -> int:
        """A descriptor of the file; OSError if it is a link, or no regular file: a pipe would be waited for."""
        for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"):
            flags |= getattr(os, name, 0)
        descriptor = os.open(self.path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file")
        return descriptor

    def _warn(self, what: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"misses cannot be {what} in {self.path}: {error}", TableWarning, stacklevel=3)
