"""Whether files that are only to be read could have been written by others: permissions and owners of POSIX."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from liger_registry.errors import TableError


def refuse_untrusted(root: Path, path: Path) -> None:
    """Raise if another user than this one and root could have put a file where it is.

    From the root down to the file nothing may be writable by the group or by all, or belong to another user. Above the
    root nothing may be writable by all, unless it has the sticky bit, with which nobody replaces another's directory.

    Args:
        root: the trusted directory.
        path: a file below it.

    Raises:
        TableError: others could; ``filename`` is the place at fault.
        OSError: a place cannot be looked at.
    """
    for place in _down(root, path):
        status = os.stat(place)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _refusal(place, f"others can write to {place}", f"chmod go-w {place}")
        if status.st_uid not in (0, os.geteuid()):
            raise _refusal(place, f"user {status.st_uid} can write to {place}", "take a copy of your own or of root's")
    for place in dict.fromkeys((*_lexical(root).parents, *Path(os.path.realpath(root)).parents)):
        mode = os.stat(place).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _refusal(place, f"others can replace {root}: they can write to {place}", f"chmod o-w {place}")


def _down(root: Path, path: Path) -> Iterator[Path]:
    """The places from the root to a path, as they are named and, where links lead elsewhere, as they are."""
    for top, end in ((root, path), (Path(os.path.realpath(root)), Path(os.path.realpath(path)))):
        place = top
        yield place
        for part in end.relative_to(top).parts:
            place = place / part
            yield place


def _lexical(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _refusal(place: Path, what: str, fix: str) -> TableError:
    refusal = TableError(what, fix=fix)
    refusal.filename = str(place)  # one warning a place, not one a table
    return refusal
