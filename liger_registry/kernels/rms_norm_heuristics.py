"""What ``rms_norm`` costs on a device, and which config to take where nothing was measured; imports no Triton.

Backends declare parameters and values; ``constrain_*`` narrows them to what is worth compiling on any vendor.
"""

from __future__ import annotations

import math

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.problem import BACKWARD, FORWARD, Problem

_BYTES = {"float64": 8, "float32": 4, "none": 0}
# Shared memory that sums over a tile take beside the loads ahead, at most; compiled for sm_90 they take 0.1 to 2.6 KiB.
_REDUCTION = 4096


def block_of(problem: Problem) -> int:
    """The block that holds a row."""
    return 1 << (int(problem.hidden) - 1).bit_length()


def elements_a_thread(config: Config, problem: Problem, device: Device) -> float:
    """Elements of a tile of ``block_rows`` (1 if it has none) rows by ``block`` (the row's, if it has none) columns."""
    tile: int = config.get("block_rows", 1) * config.get("block", block_of(problem))  # type: ignore[operator, assignment]
    return float(tile / (config.num_warps * device.limits.warp_size))


def pipeline_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of the loads that run ahead: a tile of x for each stage but the first, in backward of dy too."""
    stages = int(config.get("num_stages", 1))  # type: ignore[arg-type]
    x, weight = (_BYTES.get(str(problem.dtypes[name]), 2) for name in ("x", "weight"))
    row = x
    if problem.phase == BACKWARD:
        row += max(x, weight) if problem.casting == "llama" else x
    tile = row * int(config.get("block_rows", 1)) + (weight if config.get("reload_weight") else 0)  # type: ignore[arg-type]
    return (stages - 1) * tile * int(config.get("block", block_of(problem)))  # type: ignore[arg-type]


def registers(config: Config, problem: Problem) -> int:
    """32-bit registers of a persistent backward: tiles of x and dy, the weight's sum, and the weight if it stays."""
    return int(2 + 2 * config.block_rows - config.reload_weight) * block_of(problem)


def narrow_rows(block: int) -> int:
    """Rows of a persistent backward's tile of less than 1024 columns, which two warps hold with 32 elements a thread.

    Of 524288 rows of 128 on an H200, ``layer_norm`` took 103.5 us with 16 rows, and 147 with 64 and 4 warps; reading
    and writing alone take 94.8. 32 elements a thread are the most for which registers hold a sum for each place of a
    tile.
    """
    return max(1, min(64, 2048 // block))


def every_split_works(config: Config, problem: Problem) -> bool:
    """Whether each of the programs that share a row has columns of its own."""
    return bool((config.splits - 1) * config.block < problem.hidden)


def partial_bytes(problem: Problem, config: Config) -> int:
    """Scratch of an implementation: sums between two launches, and partial sums of the weight's gradient.

    The number of units is not in a problem; 304 of an MI300X, the most of any part, bounds it.
    """
    sums = 4 * int(problem.rows) * int(config.get("splits", 0))  # type: ignore[arg-type]
    if problem.phase == FORWARD or "weight" not in str(problem.needs).split(","):
        return sums
    tiles = -(-int(problem.rows) // int(config.block_rows))
    programs = int(config.programs_per_unit) * 304
    if "splits" in config:
        programs = -(-programs // -(-int(problem.hidden) // int(config.block)))
    return sums + 4 * int(problem.hidden) * min(tiles, programs)


def constrain_row(space: ConfigSpace) -> ConfigSpace:
    """One row a program, or rows with loads ahead."""
    return _pipelined_if_persistent(_between(space, 4, 64))


def constrain_multi_row(space: ConfigSpace) -> ConfigSpace:
    """Several narrow rows a program."""
    space = _pipelined_if_persistent(_between(space, 8, 64))
    return space.where(lambda c, p, d: p.hidden <= 2048, "a wider row fills a program by itself")


def constrain_forward_column_split(space: ConfigSpace) -> ConfigSpace:
    """Few rows, or such as no program holds."""
    space = _between(space, 4, 64).where(lambda c, p, d: every_split_works(c, p), "a split would have no columns")
    return space.where(
        lambda c, p, d: p.hidden > 32768 or p.rows <= 8 * d.units,
        "rows enough to fill the device are read once, not twice",
    )


def constrain_persistent(space: ConfigSpace) -> ConfigSpace:
    """Tiles that registers hold, in flight in shared memory."""
    space = _between(space, 16, 64)
    space = space.where(
        lambda c, p, d: registers(c, p) <= d.limits.registers, "a tile of this size does not fit the registers"
    )
    space = space.where(lambda c, p, d: c.num_warps < 32 or c.block_rows == 1, "32 warps are for rows that need them")
    space = space.where(lambda c, p, d: c.num_warps > 2 or block_of(p) < 1024, "two warps are for narrow rows")
    space = space.where(
        lambda c, p, d: c.num_stages > 1 or c.programs_per_unit >= 4,
        "nothing hides the latency of a lone program's loads",
    )
    space = space.where(
        lambda c, p, d: (
            not c.reload_weight or (c.block_rows == 1 and block_of(p) >= 8192 and p.dtypes["weight"] != "none")
        ),
        "smaller tiles leave registers for the weight",
    )
    return space.where(
        lambda c, p, d: (
            c.num_stages < 4 and (4, 4, 2)[c.num_stages - 1] <= c.programs_per_unit <= (8, 4, 4)[c.num_stages - 1]
            if block_of(p) < 1024
            else c.programs_per_unit * max(c.num_stages - 1, 1) <= 4
        ),
        "more tiles in flight than a unit needs, or fewer",
    )


def constrain_backward_column_split(space: ConfigSpace) -> ConfigSpace:
    """Rows that registers do not hold, and few rows."""
    space = _between(space, 16, 32).where(lambda c, p, d: every_split_works(c, p), "a split would have no columns")
    space = space.where(
        lambda c, p, d: (c.num_stages > 1) == (c.programs_per_unit < 4),
        "few programs with loads ahead, or many without",
    )
    return space.where(
        lambda c, p, d: p.hidden >= 8192 or p.rows <= 8 * d.units,
        "rows enough to fill the device are read once, not twice",
    )


def _between(space: ConfigSpace, least: int, most: int) -> ConfigSpace:
    tallest: int = max(space.parameters.get("block_rows", (1,)))  # type: ignore[type-var, assignment]
    fewest: int = min(space.parameters["num_warps"])  # type: ignore[type-var, assignment]

    def enough(config: Config, problem: Problem, device: Device) -> bool:
        # Heads of a few columns cannot give a thread its share; there the tallest tile with the fewest warps is legal.
        smallest = config.get("block_rows", tallest) == tallest and config.num_warps == fewest
        return smallest or elements_a_thread(config, problem, device) >= least

    space = space.where(lambda c, p, d: elements_a_thread(c, p, d) <= most, f"more than {most} elements a thread")
    space = space.where(enough, f"fewer than {least} elements a thread")
    return space.where(
        lambda c, p, d: pipeline_bytes(c, p) + _REDUCTION <= d.limits.shared_memory,
        "its loads ahead do not fit shared memory",
    )


def _pipelined_if_persistent(space: ConfigSpace) -> ConfigSpace:
    return space.where(
        lambda c, p, d: (c.num_stages > 1) == (c.programs_per_unit > 0),
        "loads run ahead in programs that loop, and only there",
    )


def nearest(space: ConfigSpace, wanted: Config, problem: Problem, device: Device) -> Config:
    """The legal config that differs least, in powers of two, from a wanted one; the wanted one if none is legal."""

    def distance(config: Config) -> float:
        off = 0.0
        for name, value in config.items():
            aim = wanted.get(name, value)
            off += abs(math.log2(int(value) + 1) - math.log2(int(aim) + 1))  # type: ignore[arg-type]
        return off

    return min(space.configs(problem, device), key=distance, default=wanted)


def heuristic_row(problem: Problem, device: Device) -> Config:
    """16 elements a thread: two 16-byte loads of bf16 in flight for each, and enough rows on a unit to hide them.

    An H200 reaches 95 % of its copy rate so at 4096 columns, where its 8 warps beat 4 and 2 by 1.5 %.
    """
    return Config(num_warps=_warps(block_of(problem), 16, device, 32), num_stages=1, programs_per_unit=0)


def heuristic_multi_row(problem: Problem, device: Device) -> Config:
    """Tiles of 4096 elements, smaller ones where there are too few rows to give each unit two.

    From 1024 columns on two rows are enough: on an H200 they take 13 % less time there than four.
    """
    block = block_of(problem)
    rows = 2 if block >= 1024 else max(2, min(64, 4096 // block))
    while rows > 2 and rows * 2 * device.units > problem.rows and rows * block > 8 * 4 * device.limits.warp_size:
        rows //= 2
    return Config(block_rows=rows, num_warps=_warps(rows * block, 16, device, 8), num_stages=1, programs_per_unit=0)


def heuristic_forward_column_split(problem: Problem, device: Device) -> Config:
    """As many splits as give each unit four programs."""
    block = 4096 if problem.hidden > 8192 else 1024
    splits = 2
    while splits < 16 and splits * 2 * problem.rows <= 4 * device.units and (splits * 2 - 1) * block < problem.hidden:
        splits *= 2
    return Config(block=block, num_warps=8 if block == 4096 else 4, splits=splits)


def heuristic_persistent(problem: Problem, device: Device) -> Config:
    """What is best on an H200: tiles of 8192 elements, three stages deep, one program a unit, more for narrow rows.

    There 2 / 4 / 1 rows with 8 / 8 / 16 warps reach 96 / 95 / 94 % of the copy rate at 4096 / 2048 / 8192 columns. At
    1024 columns two programs a unit of 4 rows and 4 warps are 25 % faster than one of 8 rows and 8 warps; at 128, four
    programs are 8 % faster than sixteen, whose partial sums take a second pass; see ``narrow_rows`` too.
    """
    block = block_of(problem)
    narrow, middle = block < 1024, 1024 <= block < 2048
    rows = max(1, min(64, 8192 // block))
    rows = narrow_rows(block) if narrow else rows
    least = 16 * (2 if narrow else 4) * device.limits.warp_size
    while rows > 1 and rows * device.units > problem.rows and rows * block > least:
        rows //= 2
    rows = min(rows, 4) if middle else rows
    warps = 2 if narrow else 4 if middle else _warps(rows * block, 16 if block >= 8192 else 32, device, 16)
    per_unit = 4 if narrow else 2 if middle else 1
    # 16384 columns: weight, sum, x and dy take all registers of a unit, and some spill; without the weight none does.
    reload = block >= 16384 and problem.dtypes["weight"] != "none"
    for stages in (3, 2):
        config = Config(
            block_rows=rows, num_warps=warps, num_stages=stages, programs_per_unit=per_unit, reload_weight=reload
        )
        if pipeline_bytes(config, problem) + _REDUCTION <= device.limits.shared_memory:
            return config
    return config.having(num_stages=1, programs_per_unit=max(per_unit, 4))


def heuristic_backward_column_split(problem: Problem, device: Device) -> Config:
    """Blocks of 2048 columns, two rows at a time, two parts of a row for its dot."""
    block = 2048 if problem.hidden > 2048 else 1024
    config = Config(block=block, block_rows=4096 // block, num_warps=4, num_stages=3, programs_per_unit=2, splits=2)
    if pipeline_bytes(config, problem) + _REDUCTION <= device.limits.shared_memory:
        return config
    return config.having(num_stages=1, programs_per_unit=8)


def _warps(elements: int, a_thread: int, device: Device, most: int) -> int:
    warps = elements // (a_thread * device.limits.warp_size)
    return max(1 if most == 32 else 4, min(most, warps, device.limits.max_threads // device.limits.warp_size))
