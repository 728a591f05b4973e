"""What ``jsd``, ``kl_div`` and ``tvd`` cost on a device, and which config to take where nothing was measured.

Backends declare parameters and values; ``constrain_*`` narrows them to what is worth compiling on any vendor. This
imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.kernels.rms_norm_heuristics import nearest
from liger_registry.problem import BACKWARD, Problem

_BYTES = {"float64": 8, "float32": 4}
# Shared memory that a block's reductions take beside the loads ahead, at most.
_REDUCTION = 4096
# The most units of any part, an MI300X: a problem does not say how many there are.
_MOST_UNITS = 304


def partial_bytes(problem: Problem, config: Config) -> int:
    """Scratch of a sum: one number a program."""
    if problem.phase == BACKWARD or problem.elementwise:
        return 0
    programs = int(config.get("programs_per_unit", 0)) * _MOST_UNITS  # type: ignore[arg-type]
    return 4 * (programs or int(problem.rows))


def constrain_row(space: ConfigSpace) -> ConfigSpace:
    """A program a row."""
    return _blocks(space)


def constrain_tiles(space: ConfigSpace) -> ConfigSpace:
    """Blocks of all rows, dealt out to programs; a block of its own for each only where nothing is summed."""
    return _blocks(space).where(
        lambda c, p, d: c.programs_per_unit > 0 or (c.num_stages == 1 and (p.phase == BACKWARD or p.elementwise)),
        "a partial sum for each block, or loads ahead of a single one",
    )


def _blocks(space: ConfigSpace) -> ConfigSpace:
    smallest: int = min(space.parameters["block"])  # type: ignore[type-var, assignment]
    fewest: int = min(space.parameters["num_warps"])  # type: ignore[type-var, assignment]
    space = space.where(lambda c, p, d: c.block == smallest or c.block < p.vocab, "a smaller block holds the row too")
    space = space.where(
        lambda c, p, d: c.num_warps == fewest or c.block > smallest, "a small block with more warps than it needs"
    )
    space = space.where(
        lambda c, p, d: 4 <= c.block / (c.num_warps * d.limits.warp_size) <= 32, "too few elements a thread, or many"
    )
    return space.where(
        lambda c, p, d: _ahead(c, p) + _REDUCTION <= d.limits.shared_memory, "its loads ahead do not fit shared memory"
    )


def _ahead(config: Config, problem: Problem) -> int:
    """Bytes of the loads that run ahead: a block of each tensor for each stage."""
    a_column = sum(_BYTES.get(str(problem.dtypes[name]), 2) for name in ("input", "target"))
    if problem.phase == BACKWARD and problem.elementwise:
        a_column += 4
    stages = int(config.get("num_stages", 1))  # type: ignore[arg-type]
    return (stages if stages > 1 else 0) * a_column * int(config.block)


def _block(problem: Problem, device: Device) -> tuple[int, int]:
    """Block and warps: 16 elements a thread, so that two loads of 16 bytes of each tensor are in flight."""
    block = 4096 if problem.vocab > 4096 else 1024
    return block, max(4, min(8, block // (16 * device.limits.warp_size)))


def heuristic_row(problem: Problem, device: Device) -> Config:
    """Blocks of 4096 columns, smaller ones for narrow rows."""
    block, warps = _block(problem, device)
    return Config(block=block, num_warps=warps, num_stages=1)


def heuristic_tiles(problem: Problem, device: Device) -> Config:
    """As many programs as a unit holds with that many warps, each some blocks with loads ahead."""
    block, warps = _block(problem, device)
    return Config(block=block, num_warps=warps, num_stages=2, programs_per_unit=8)


def nearest_to(
    space: ConfigSpace, wanted: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    """The config of a space that is nearest to what a heuristic wants; itself wherever it is legal."""
    config = wanted(problem, device).having()
    # A device whose compiler knows more parameters has them at their first value.
    missing = {name: values[0] for name, values in space.parameters.items() if name not in config}
    config = config.having(**missing)
    return config if space.why_illegal(config, problem, device) is None else nearest(space, config, problem, device)
