"""Faults of a machine, planted into the calls by which a process reaches files, locks and clocks.

A child process installs them in itself: what fails there is what a disk, a file system or a clock would let fail.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import time

#: The calls that may fail, by the name a plan knows them under.
CALLS = ("open", "write", "short", "fsync", "replace", "lock", "mkdir", "utime", "stat", "unlink")
_real_open, _real_builtin_open = os.open, builtins.open


class Faults:
    """Lets some calls fail.

    Args:
        plan: for each call the errors, by name, of which one is raised.
        chance: of each call to fail.
        seed: fixes which do.
        below: paths outside it are left alone, so that the interpreter itself goes on.
    """

    def __init__(self, plan: dict[str, list[str]], chance: float, seed: int, below: str) -> None:
        self.plan, self.chance, self.below = plan, chance, os.path.realpath(below)
        self.random = random.Random(seed)
        self.on = True
        self.count = 0
        self._descriptors: set[int] = set()
        assert set(plan) <= set(CALLS)

    def fails(self, call: str) -> OSError | None:
        if not self.on or call not in self.plan or self.random.random() >= self.chance:
            return None
        self.count += 1
        code = getattr(errno, self.random.choice(self.plan[call]))
        return OSError(code, os.strerror(code))

    def mine(self, place: object) -> bool:
        if isinstance(place, int):
            return place in self._descriptors
        return isinstance(place, str | os.PathLike) and os.path.abspath(os.fspath(place)).startswith(self.below)

    def install(self) -> None:
        import fcntl

        faults = self

        def guarded(call, real, wanted=lambda *args: True):
            def run(*args, **kwargs):
                if args and faults.mine(args[0]) and wanted(*args) and (error := faults.fails(call)):
                    raise error
                return real(*args, **kwargs)

            return run

        def opens(path, flags, *rest, **kwargs):
            ours = faults.mine(path)
            if ours and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and (error := faults.fails("open")):
                raise error
            descriptor = _real_open(path, flags, *rest, **kwargs)
            (faults._descriptors.add if ours else faults._descriptors.discard)(descriptor)
            return descriptor

        class Raw(io.FileIO):
            def write(self, data):
                if error := faults.fails("write"):
                    raise error
                if error := faults.fails("short"):
                    super().write(memoryview(data)[: len(data) // 2])
                    raise error
                return super().write(data)

        def builtin_open(file, mode="r", *args, **kwargs):
            if isinstance(file, int) and faults.mine(file) and mode == "wb":
                return io.BufferedWriter(Raw(file, mode))
            return _real_builtin_open(file, mode, *args, **kwargs)

        def writes(descriptor, data, real=os.write):
            if faults.mine(descriptor):
                if error := faults.fails("write"):
                    raise error
                if faults.fails("short"):  # as write(2) itself does on a disk that gets full
                    return real(descriptor, data[: len(data) // 2])
            return real(descriptor, data)

        def locks(descriptor, operation, real=fcntl.flock):
            target = os.readlink(f"/proc/self/fd/{descriptor}") if os.path.isdir("/proc/self/fd") else ""
            here = not target or target.startswith(faults.below)
            if here and operation & fcntl.LOCK_EX and (error := faults.fails("lock")):
                raise error
            return real(descriptor, operation)

        os.open, os.write, fcntl.flock, builtins.open = opens, writes, locks, builtin_open
        for call, names in {
            "fsync": ("fsync",),
            "replace": ("replace", "rename"),
            "mkdir": ("mkdir",),
            "utime": ("utime",),
            "stat": ("stat",),
            "unlink": ("unlink",),
        }.items():
            for name in names:
                setattr(os, name, guarded(call, getattr(os, name)))


def clock(kind: str, seed: int = 0) -> None:
    """Make this process's wall clock go ``backwards``, stand ``frozen`` or ``jump`` about."""
    real, chance = time.time_ns, random.Random(seed)
    began = real()
    given = {
        "backwards": lambda: began - 50 * (real() - began),
        "frozen": lambda: 1_700_000_000_123_456_789,
        "jump": lambda: began + chance.randrange(-(10**18), 10**18),
    }[kind]
    time.time_ns = given
    time.time = lambda: given() / 1e9
