"""What the operating system says about the processor; every figure falls back where a system does not tell it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Processor:
    """This machine's processor.

    Attributes:
        machine: ``x86_64`` or ``aarch64``, spelt alike on every system.
        capability: the vector extension PyTorch's kernels use, ``avx512``; empty where it says none.
        model: the model's name, as the system spells it.
        cores: how many this process may use.
        memory_bytes: the machine's whole memory; 0 where unknown.
        cache_bytes: the last-level cache; 0 where unknown.
    """

    machine: str
    capability: str
    model: str
    cores: int
    memory_bytes: int
    cache_bytes: int


def describe() -> Processor:
    """The processor this process runs on."""
    import torch

    machine = platform.machine().lower()
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return Processor(
        machine={"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(machine, machine),
        capability="" if capability in ("default", "no avx") else capability.replace(" ", ""),
        model=model_name(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        cache_bytes=last_level_cache(),
    )


def model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name; the machine's kind where the system tells no more (most ARM kernels do not)."""
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """The cores this process may use: its affinity where the system has one, else all."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory in bytes, 0 where unknown."""
    try:
        return max(0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, others lack the names
        return 0


def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size in bytes of the highest level of cache, 0 where unknown."""
    found = (0, 0)
    for entry in root.glob("index*"):
        level, size = _read(entry / "level").strip(), _read(entry / "size").strip()
        number, unit = size[:-1], {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:])
        if level.isdecimal() and number.isdecimal() and unit is not None:
            found = max(found, (int(level), int(number) * unit))
    return found[1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
