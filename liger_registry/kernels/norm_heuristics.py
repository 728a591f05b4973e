"""What ``layer_norm`` and ``fused_add_rms_norm`` cost on a device, and which config to take where nothing was measured.

Their kernels are those of ``rms_norm`` with more tensors or more sums, so the same parameters count; what differs are
the loads in flight and the registers. Imports no Triton. Where a number has no reason beside it, it is what
``rms_norm`` does best with.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.kernels.rms_norm_heuristics import (
    block_of,
    elements_a_thread,
    every_split_works,
    heuristic_forward_column_split,
    heuristic_multi_row,
    narrow_rows,
)
from liger_registry.kernels.rms_norm_heuristics import heuristic_row as _row_of_rms_norm
from liger_registry.kernels.rms_norm_heuristics import nearest as _nearest
from liger_registry.problem import BACKWARD, FORWARD, Problem

__all__ = [
    "heuristic_forward_column_split",
    "heuristic_multi_row",
]

_BYTES = {"float64": 8, "float32": 4, "none": 0}
# Shared memory that sums over a tile take beside the loads ahead, at most.
_REDUCTION = 4096


def tensors_read(problem: Problem) -> int:
    """Tensors of the size of x that a phase reads."""
    added = problem.op == "fused_add_rms_norm"
    return (2 if problem.phase == BACKWARD else 1) + added


def row_bytes(problem: Problem) -> int:
    """Bytes that a phase reads for each element of x."""
    x, weight = (_BYTES.get(str(problem.dtypes[name]), 2) for name in ("x", "weight"))
    total = x * tensors_read(problem)
    if problem.phase == BACKWARD and problem.flags.get("casting") == "llama":
        total += max(x, weight) - x  # the gradient has the dtype of y, which is the wider one
    return total


def vector_sums(problem: Problem) -> int:
    """How many gradients of vectors a backward sums over the rows."""
    needs = str(problem.flags.get("needs", "")).split(",")
    return sum(name in needs and problem.dtypes.get(name, "none") != "none" for name in ("weight", "bias"))


def pipeline_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of the loads that run ahead: a tile of each tensor for each stage but the first."""
    stages = int(config.get("num_stages", 1))  # type: ignore[arg-type]
    tile = row_bytes(problem) * int(config.get("block_rows", 1))  # type: ignore[arg-type]
    if config.get("reload_weight"):
        tile += _BYTES.get(str(problem.dtypes["weight"]), 2)
    return (stages - 1) * tile * int(config.get("block", block_of(problem)))  # type: ignore[arg-type]


def registers(config: Config, problem: Problem) -> int:
    """32-bit registers of a persistent backward: tiles of x and the gradient, the sums, and the weight if it stays.

    What ``fused_add_rms_norm`` reads besides is not held: it is added when the rest is done.
    """
    weight = problem.dtypes["weight"] != "none" and not config.reload_weight
    return int(2 * config.block_rows + vector_sums(problem) + weight) * block_of(problem)


def extra_bytes(problem: Problem, config: Config) -> int:
    """Scratch of an implementation: sums between two launches, and partial sums of the vectors' gradients.

    The number of units is not in a problem; 304 of an MI300X, the most of any part, bounds it.
    """
    pairs = 2 if problem.op == "layer_norm" else 1
    sums = 4 * pairs * int(problem.rows) * int(config.get("splits", 0))  # type: ignore[arg-type]
    vectors = vector_sums(problem)
    if problem.phase == FORWARD or not vectors:
        return sums
    tiles = -(-int(problem.rows) // int(config.block_rows))
    programs = int(config.programs_per_unit) * 304
    if "splits" in config:
        programs = -(-programs // -(-int(problem.hidden) // int(config.block)))
    return sums + 4 * vectors * int(problem.hidden) * min(tiles, programs)


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
    space = space.where(
        # 16384 columns with 8 warps spill 70 registers a thread in layer_norm, 62 in the other; 4096 with 4 spill none.
        lambda c, p, d: registers(c, p) <= 200 * int(c.num_warps) * d.limits.warp_size,
        "its threads hold more than they have registers for",
    )
    space = space.where(lambda c, p, d: c.num_warps < 32 or c.block_rows == 1, "32 warps are for rows that need them")
    space = space.where(lambda c, p, d: c.num_warps > 2 or block_of(p) < 1024, "two warps are for narrow rows")
    space = space.where(
        # 64 rows of 64 columns with 2 warps spill 672 to 1,066 registers on sm_80, with 32 elements a thread none.
        lambda c, p, d: c.num_warps > 2 or elements_a_thread(c, p, d) <= 32,
        "two warps hold sums for 32 elements a thread",
    )
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


def nearest(
    space: ConfigSpace, heuristic: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    """What a heuristic wants where that is legal, which it nearly always is; else the legal config most like it."""
    wanted = heuristic(problem, device)
    # Asking about one config takes a thousandth of the time that walking through a space does.
    return wanted if space.why_illegal(wanted, problem, device) is None else _nearest(space, wanted, problem, device)


def heuristic_row(problem: Problem, device: Device) -> Config:
    """``layer_norm``: 32 elements a thread, and of wide rows programs that stay; the other as ``rms_norm``.

    On an H200 16384 x 4096 took 66.8 us with a program a row and 72.6 with four that stay, 8192 x 16384 took 140.9 and
    with one 137.7.
    """
    if problem.op != "layer_norm":
        return _row_of_rms_norm(problem, device)
    block = block_of(problem)
    warps = max(1, min(block // (32 * device.limits.warp_size), device.limits.max_threads // device.limits.warp_size))
    if block <= 8192:
        return Config(num_warps=warps, num_stages=1, programs_per_unit=0)
    return Config(num_warps=warps, num_stages=3, programs_per_unit=1)


def heuristic_persistent(problem: Problem, device: Device) -> Config:
    """Tiles of 8192 elements, of 4096 from 1024 to 2048 columns; three stages; more programs for narrow rows."""
    block = block_of(problem)
    narrow, middle = block < 1024, 1024 <= block < 2048
    rows = max(1, (8192 if block >= 4096 else 4096) // block)
    rows = narrow_rows(block) if narrow else rows
    least = 16 * (2 if narrow else 4) * device.limits.warp_size
    while rows > 1 and rows * device.units > problem.rows and rows * block > least:
        rows //= 2
    rows = min(rows, 4) if middle else rows
    a_thread = 16 if block >= 8192 else 32
    warps = 2 if narrow else 4 if middle else max(4, min(16, rows * block // (a_thread * device.limits.warp_size)))
    per_unit = 4 if narrow else 2 if block < 4096 else 1
    reload = block >= 16384 and problem.dtypes["weight"] != "none"
    for stages in (3, 2):
        config = Config(
            block_rows=rows, num_warps=warps, num_stages=stages, programs_per_unit=per_unit, reload_weight=reload
        )
        if pipeline_bytes(config, problem) + _REDUCTION <= device.limits.shared_memory:
            return config
    return config.having(num_stages=1, programs_per_unit=max(per_unit, 4))


def heuristic_backward_column_split(problem: Problem, device: Device) -> Config:
    """Blocks of 2048 columns, two rows at a time, two parts of a row for its sums."""
    block = 2048 if problem.hidden > 2048 else 1024
    config = Config(block=block, block_rows=4096 // block, num_warps=4, num_stages=3, programs_per_unit=2, splits=2)
    if pipeline_bytes(config, problem) + _REDUCTION <= device.limits.shared_memory:
        return config
    return config.having(num_stages=1, programs_per_unit=8)
