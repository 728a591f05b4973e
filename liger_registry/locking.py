"""Locks beside files, also on file systems that have none.

NFS without its lock service answers ``ENOLCK``, Lustre without ``-o flock`` ``ENOSYS``, some others ``EOPNOTSUPP``.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import inspect
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

#: What a file system says that has no locks.
LOCKLESS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
# Newer releases of filelock take a marker file in place of a missing lock: it outlives a killed holder, and the warning
# that goes with it may be an error. Older ones raise NotImplementedError.
_OWN = {"fallback_to_soft": False} if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters else {}


@contextlib.contextmanager
def locked(path: Path | str, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of a file, ``<path>.lock``; within it, whether processes of other machines are kept out too.

    Where the file system has no locks, a lock in this machine's directory for temporary files stands in for it.

    Args:
        path: the file; it need not exist.
        timeout_s: how long to wait for another process.

    Raises:
        TimeoutError: another process holds it still.
        OSError, NotImplementedError: no lock can be made.
    """
    with contextlib.ExitStack() as stack:
        shared = True
        try:
            # The lock file stays: deleting it would let one process lock the old file and another the new one.
            stack.enter_context(_lock(f"{path}.lock", timeout_s))
        except (OSError, NotImplementedError) as error:
            if not lockless(error):
                raise
            shared = False
            name = hashlib.sha256(os.path.realpath(path).encode(errors="surrogateescape")).hexdigest()[:24]
            stack.enter_context(_lock(str(own_directory() / f"table-{name}.lock"), timeout_s))
        yield shared


def lockless(error: BaseException) -> bool:
    """Whether an error says that a file system has no locks."""
    return isinstance(error, NotImplementedError) or (isinstance(error, OSError) and error.errno in LOCKLESS)


def own_directory() -> Path:
    """This user's directory of locks, which is made if need be.

    Raises:
        OSError: it cannot be made, or somebody else made it: opening a lock would follow and empty what it links to.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        user = "user"
    directory = Path(tempfile.gettempdir()) / f"liger-registry-{re.sub(r'[^0-9a-zA-Z._-]', '_', user)}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
        raise PermissionError(errno.EPERM, "it belongs to another user, or is a link", str(directory))
    return directory


def _lock(path: str, timeout_s: float) -> Any:  # noqa: ANN401 - what filelock calls it depends on its version
    if os.path.islink(path):
        # Releases of filelock before 3.20 follow it, and empty what it leads to.
        raise OSError(errno.ELOOP, "a link lies where the lock should", path)
    options: dict[str, Any] = {"timeout": timeout_s, "mode": 0o600, **_OWN}
    return FileLock(path, **options).acquire(poll_interval=0.01)
