"""Watches what code does while it handles data: nothing may be run, loaded or written but below one directory.

Python reports such operations to audit hooks before they happen. A hook cannot be taken out again, so one is put in
per process, which looks on only while a guard is held.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Running or loading anything, and talking to anybody.
NEVER = (
    "code.__new__", "compile", "ctypes.", "exec", "ftplib.", "function.__new__", "http.", "imaplib.", "import",
    "marshal.", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.posix_spawn", "os.spawn",
    "os.startfile", "os.system", "pickle.", "pty.", "shutil.", "smtplib.", "socket.", "sqlite3.", "subprocess.",
    "urllib.", "webbrowser.",
)  # fmt: skip
# Changing files; each takes paths among its arguments.
WRITES = (
    "os.chflags", "os.chmod", "os.chown", "os.link", "os.lockf", "os.mkdir", "os.mkfifo", "os.mknod", "os.remove",
    "os.removexattr", "os.rename", "os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime",
    "tempfile.mkdtemp", "tempfile.mkstemp",
)  # fmt: skip
_OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ViolationError(BaseException):
    """Something was about to happen that data must not bring about; no ``except Exception`` hides it."""


_allowed: list[Path] = []
_judges: list[Callable[[str, tuple[Any, ...]], str | None]] = []
_seen: list[str] = []


@contextmanager
def guarded(*roots: Path | str, imports: bool = False) -> Iterator[None]:
    """Within it nothing is run or loaded, and nothing is written but below the given directories.

    Args:
        roots: where files may be written; links are followed.
        imports: whether modules may be imported, which compiles and runs their code.

    Raises:
        ViolationError: something was, even if somebody caught the first exception.
    """
    if not _judges:
        _judges.append(_why_not)
        sys.addaudithook(_hook)
    global _imports
    before, _allowed[:], was = list(_allowed), [Path(os.path.realpath(root)) for root in roots], _imports
    _imports, _watching[0] = imports, _watching[0] + 1
    _seen.clear()
    try:
        yield
    finally:
        _watching[0] -= 1
        _allowed[:], _imports = before, was
    if _seen:
        raise ViolationError(_seen[0])


_imports = False
_watching = [0]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching[0]:
        return
    watching, _watching[0] = _watching[0], 0  # what the judge itself does is no business of its own
    try:
        reason = _judges[0](event, arguments)
    finally:
        _watching[0] = watching
    if reason is not None:
        _seen.append(reason)
        raise ViolationError(reason)


def _why_not(event: str, arguments: tuple[Any, ...]) -> str | None:
    if event == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & _OPENS_TO_WRITE
        follows = isinstance(flags, int) and not flags & getattr(os, "O_NOFOLLOW", 0)
        return _outside(event if follows else "make", (path,)) if writes else None
    if event.startswith(WRITES):
        return _outside(event, arguments)
    if event.startswith(NEVER):
        loading = event in ("import", "exec", "compile", "marshal.loads", "code.__new__", "function.__new__")
        return None if _imports and loading else f"{event}{arguments!r}"[:300]
    return None


def _outside(event: str, arguments: tuple[Any, ...]) -> str | None:
    for path in arguments:
        if not isinstance(path, str | bytes | os.PathLike):
            continue
        place = Path(os.fsdecode(path))
        # A link itself may be replaced or removed; what it leads to may not be opened for writing.
        end = place if event == "open" else Path(os.path.realpath(place.parent)) / place.name
        real = Path(os.path.realpath(end)) if event == "open" else end
        if str(place) != os.devnull and not any(real.is_relative_to(root) for root in _allowed):
            return f"{event} of {place}, which is {real}"
    return None
