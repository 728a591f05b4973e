"""What gated activations cost on a device, and which config to take where nothing was measured; imports no Triton.

They move bytes and do little else: what counts is that enough loads are in flight. Backends declare parameters and
values; ``constrain_*`` narrows them to what is worth compiling on any vendor.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.kernels.rms_norm_heuristics import nearest
from liger_registry.problem import BACKWARD, Problem

_BYTES = {"float64": 8, "float32": 4}
# Elements of a tile: fewer leave a unit idle between programs, more do not fit the registers of four warps.
_LEAST, _MOST, _MOST_AHEAD = 1024, 8192, 4096


def is_packed(problem: Problem) -> bool:
    """Whether gates and ups lie in one tensor."""
    return problem.dtypes.get("up") == "none"


def bytes_read(problem: Problem) -> int:
    """Bytes that are read for each element of the result."""
    sizes = [_BYTES.get(str(dtype), 2) for dtype in problem.dtypes.values() if dtype != "none"]
    return sum(sizes) + (sizes[0] if is_packed(problem) else 0) + (max(sizes) if problem.phase == BACKWARD else 0)


def columns_of(problem: Problem) -> int:
    """The block that holds a row."""
    return 1 << (int(problem.width) - 1).bit_length()


def constrain_flat(space: ConfigSpace) -> ConfigSpace:
    """Blocks of contiguous tensors; the halves of a packed one are contiguous row by row alone."""
    return _shared_out(space).where(lambda c, p, d: not is_packed(p), "the halves of a packed tensor lie in rows")


def constrain_rows(space: ConfigSpace) -> ConfigSpace:
    """Tiles by strides: part of a wide row, or several narrow ones."""
    space = _shared_out(space)
    space = space.where(
        lambda c, p, d: c.block <= max(64, columns_of(p)), "a block of this size reaches far beyond the row"
    )
    return space.where(
        lambda c, p, d: c.block_rows == 1 or c.block >= p.width, "several rows only where a block holds each"
    )


def constrain_persistent(space: ConfigSpace) -> ConfigSpace:
    """The same tiles with loads ahead, as many as shared memory holds for all programs of a unit."""
    space = constrain_rows(space).where(lambda c, p, d: elements(c) <= _MOST_AHEAD, "a tile this large, several times")
    space = space.where(
        lambda c, p, d: 2 <= tiles_ahead(c) <= 12, "fewer tiles in flight than hide latency, or more than it takes"
    )
    return space.where(
        lambda c, p, d: tiles_ahead(c) * elements(c) * bytes_read(p) <= max(d.limits.shared_memory, 1 << 16),
        "its loads ahead do not fit shared memory",
    )


def tiles_ahead(config: Config) -> int:
    """Tiles in flight on a unit."""
    return int(config.programs_per_unit) * max(int(config.num_stages) - 1, 1)


def elements(config: Config) -> int:
    """Elements of a tile."""
    return int(config.block) * int(config.get("block_rows", 1))  # type: ignore[arg-type]


def _shared_out(space: ConfigSpace) -> ConfigSpace:
    """Tiles of a size, 4 to 32 elements a thread: with 8 of bf16 each of its loads is one of 16 bytes."""
    space = space.where(lambda c, p, d: _LEAST <= elements(c) <= _MOST, "a tile too small, or too large")
    return space.where(
        lambda c, p, d: 4 <= elements(c) / (int(c.num_warps) * d.limits.warp_size) <= 32,
        "too few elements a thread, or too many",
    )


def heuristic_flat(problem: Problem, device: Device) -> Config:
    """16 elements a thread of four warps, which keeps two loads of 16 bytes a tensor in flight; half of it for few.

    A fifth of an H200's units would idle at the end of 2^21 elements in blocks of 4096.
    """
    block = _size(problem, device)
    return Config(block=block, num_warps=4)


def heuristic_rows(problem: Problem, device: Device) -> Config:
    """The same sizes as tiles."""
    size, columns = _size(problem, device), max(columns_of(problem), 64)
    block = min(size, columns)
    rows = min(size // block, 32) if block >= problem.width else 1
    return Config(block=block, block_rows=rows, num_warps=4)


def heuristic_persistent(problem: Problem, device: Device) -> Config:
    """Tiles of 2048 with two loads ahead, four programs a unit.

    In bf16 that is 64 KiB in flight in forward and 96 in backward; an H200 hides its latency from 26 KiB a unit on.
    """
    return heuristic_rows(problem, device).having(num_stages=3, programs_per_unit=4)


def legal(
    space: ConfigSpace, heuristic: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    """What a heuristic names, or the nearest that a vendor's space has and shared memory allows."""
    return nearest(space, heuristic(problem, device), problem, device)


def _size(problem: Problem, device: Device) -> int:
    few = int(problem.rows) * int(problem.width) < 4 * 2048 * device.units
    return 1024 if few else 2048
