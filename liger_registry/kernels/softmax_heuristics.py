"""What ``softmax`` costs on a device, and which config to take where nothing was measured; imports no Triton.

Backends declare parameters and values; ``constrain_*`` narrows them to what is worth compiling on any vendor.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.kernels.rms_norm_heuristics import nearest
from liger_registry.problem import BACKWARD, Problem

_BYTES = {"float64": 8, "float32": 4}
# Shared memory that a tile's reductions take beside the loads ahead, at most.
_REDUCTION = 4096


def block_of(problem: Problem) -> int:
    """The block that holds a row."""
    return 1 << (int(problem.width) - 1).bit_length()


def split_bytes(problem: Problem, config: Config) -> int:
    """Scratch between the two launches: two numbers a part in forward, one in backward."""
    return int(problem.rows) * int(config.splits) * (4 if problem.phase == BACKWARD else 8)


def constrain_multi_row(space: ConfigSpace) -> ConfigSpace:
    """Rows that registers hold, several narrow ones at a time."""
    tallest, fewest = max(space.parameters["block_rows"]), min(space.parameters["num_warps"])  # type: ignore[type-var]

    def tile(config: Config, problem: Problem) -> int:
        return int(config.block_rows) * block_of(problem)

    def a_thread(config: Config, problem: Problem, device: Device) -> float:
        return tile(config, problem) / (int(config.num_warps) * device.limits.warp_size)

    space = space.where(lambda c, p, d: c.block_rows == 1 or tile(c, p) <= 16384, "a wide row fills a program alone")
    # Backward holds dy and y, and from 32 elements a thread on it spills.
    space = space.where(
        lambda c, p, d: a_thread(c, p, d) <= (32 if p.phase == BACKWARD else 64), "too many elements a thread"
    )
    space = space.where(
        # A few columns cannot give a thread its share; there the tallest tile with the fewest warps is legal.
        lambda c, p, d: a_thread(c, p, d) >= 4 or (c.block_rows == tallest and c.num_warps == fewest),
        "fewer than 4 elements a thread",
    )
    space = space.where(
        lambda c, p, d: (c.get("num_stages", 1) > 1) == (c.get("programs_per_unit", 0) > 0),  # type: ignore[operator]
        "loads run ahead in programs that loop, and only there",
    )
    return space.where(
        lambda c, p, d: _ahead(c, p, tile(c, p)) + _REDUCTION <= d.limits.shared_memory,
        "its loads ahead do not fit shared memory",
    )


def constrain_looping(space: ConfigSpace) -> ConfigSpace:
    """A program a row: rows that registers do not hold, and rows of any width with its smallest config alone."""
    space = space.where(
        lambda c, p, d: p.width > 2048 or (c.block, c.num_warps, c.get("num_stages", 1)) == (1024, 4, 1),
        "a block of this size reaches far beyond the row",
    )
    space = space.where(lambda c, p, d: c.block == 1024 or c.block < p.width, "a smaller block holds the row too")
    space = space.where(
        lambda c, p, d: 4 <= c.block / (c.num_warps * d.limits.warp_size) <= 32, "too few elements a thread, or many"
    )
    return space.where(
        lambda c, p, d: _ahead(c, p, int(c.block)) + _REDUCTION <= d.limits.shared_memory,
        "its loads ahead do not fit shared memory",
    )


def constrain_column_split(space: ConfigSpace) -> ConfigSpace:
    """Few rows, or such as no program holds."""
    space = space.where(lambda c, p, d: (c.splits - 1) * c.block < p.width, "a split would have no columns")
    space = space.where(
        lambda c, p, d: 4 <= c.block / (c.num_warps * d.limits.warp_size) <= 32, "too few elements a thread, or many"
    )
    return space.where(
        lambda c, p, d: p.width > 32768 or p.rows <= 8 * d.units,
        "rows enough to fill the device are read once, not twice",
    )


def _ahead(config: Config, problem: Problem, tile: int) -> int:
    """Bytes of the loads that run ahead: a tile for each stage but the first, in backward of two tensors."""
    tensors = 2 if problem.phase == BACKWARD else 1
    stages = int(config.get("num_stages", 1)) - 1  # type: ignore[arg-type]
    return stages * tensors * tile * _BYTES.get(str(problem.dtypes["x"]), 2)


def heuristic_multi_row(problem: Problem, device: Device) -> Config:
    """Tiles of 2048 elements or one row, 16 elements a thread; smaller tiles where few rows would idle units."""
    block = block_of(problem)
    rows = max(1, min(64, 2048 // block))
    while rows > 1 and rows * 2 * device.units > problem.rows and rows * block > 4 * device.limits.warp_size:
        rows //= 2
    warps = max(1, min(32, rows * block // (16 * device.limits.warp_size), _most_warps(device)))
    return Config(block_rows=rows, num_warps=warps, num_stages=1, programs_per_unit=0)


def heuristic_looping(problem: Problem, device: Device) -> Config:
    """Blocks of 4096 columns, 16 elements a thread: two loads of 16 bytes of bf16 in flight for each."""
    if problem.width <= 4096:
        return Config(block=1024, num_warps=4, num_stages=1)
    return Config(block=4096, num_warps=max(4, min(8, 4096 // (16 * device.limits.warp_size))), num_stages=1)


def heuristic_column_split(problem: Problem, device: Device) -> Config:
    """As many splits as give each unit four programs."""
    block = 4096 if problem.width > 8192 else 1024
    splits = 2
    while splits < 16 and splits * 2 * problem.rows <= 4 * device.units and (splits * 2 - 1) * block < problem.width:
        splits *= 2
    return Config(block=block, num_warps=8 if block == 4096 else 4, splits=splits)


def nearest_to(
    space: ConfigSpace, wanted: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    """The config of a space that is nearest to what a heuristic wants; itself wherever it is legal."""
    config = wanted(problem, device)
    if space.why_illegal(config, problem, device) is None:
        return config
    return nearest(space, config, problem, device)


def _most_warps(device: Device) -> int:
    return device.limits.max_threads // device.limits.warp_size
