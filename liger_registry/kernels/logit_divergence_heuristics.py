"""What ``logit_divergence`` costs on a device, and which config to take where nothing was measured. Needs no Triton."""

from __future__ import annotations

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.problem import Problem

_BYTES = {"float64": 8, "float32": 4}
# Shared memory that a block's reductions take beside the loads ahead, at most.
_REDUCTION = 4096


def split_bytes(problem: Problem, config: Config) -> int:
    """Scratch between the launches: six numbers a part of a row."""
    return 24 * int(problem.rows) * int(config.splits)


def constrain_row(space: ConfigSpace) -> ConfigSpace:
    """A program a row."""
    return _blocks(space)


def constrain_column_split(space: ConfigSpace) -> ConfigSpace:
    """Few rows: parts of each that have columns of their own."""
    return (
        _blocks(space)
        .where(lambda c, p, d: (c.splits - 1) * c.block < p.vocab, "a split would have no columns")
        .where(lambda c, p, d: p.rows <= 8 * d.units, "rows enough to fill the device keep their columns in the cache")
    )


def _blocks(space: ConfigSpace) -> ConfigSpace:
    smallest: int = min(space.parameters["block"])  # type: ignore[type-var, assignment]
    space = space.where(lambda c, p, d: c.block == smallest or c.block < p.vocab, "a smaller block holds the row too")
    # Two tensors, two running sums and the temporaries of a mixture: from 32 elements a thread on it spills.
    space = space.where(
        lambda c, p, d: 2 <= c.block / (c.num_warps * d.limits.warp_size) <= 16, "too few elements a thread, or many"
    )
    return space.where(
        lambda c, p, d: _ahead(c, p) + _REDUCTION <= d.limits.shared_memory, "its loads ahead do not fit shared memory"
    )


def _ahead(config: Config, problem: Problem) -> int:
    """Bytes of the loads that run ahead: a block of each tensor for each stage."""
    a_column = sum(_BYTES.get(str(problem.dtypes[name]), 2) for name in ("student", "teacher"))
    stages = int(config.get("num_stages", 1))  # type: ignore[arg-type]
    return (stages if stages > 1 else 0) * a_column * int(config.block)


def heuristic_row(problem: Problem, device: Device) -> Config:
    """Blocks of 4096 columns, 8 elements a thread: few rows at a time, which the cache keeps for the next walk."""
    block = 4096 if problem.vocab > 4096 else 1024
    return Config(block=block, num_warps=max(4, block // (8 * device.limits.warp_size)), num_stages=1)


def heuristic_column_split(problem: Problem, device: Device) -> Config:
    """As many splits as give each unit four programs."""
    block, splits = 2048 if problem.vocab > 4096 else 1024, 1
    while splits < 16 and splits * problem.rows < 4 * device.units and (splits * 2 - 1) * block < problem.vocab:
        splits *= 2
    return Config(block=block, num_warps=max(4, block // (8 * device.limits.warp_size)), splits=splits)
