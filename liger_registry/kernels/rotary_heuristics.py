"""What ``rope`` and ``qk_norm_rope`` cost on a device, and which config to take where nothing was measured.

A tile is ``block_rows`` tokens by up to ``block`` heads by the columns of a head. Imports no Triton. Nothing here was
measured for these two operations yet; a number without a reason beside it is what ``rms_norm`` does best with.
"""

from __future__ import annotations

import math

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.problem import BACKWARD, Problem

#: Blocks of heads that a program's code is written out for, of queries or of keys.
_UNROLLED = 8
#: Elements of all heads that a thread may hold. Of the presets' kernels the worst spill 1,448 registers (sm_80) and 442
#: (gfx942) with 320, 156 and 391 with 192, none and 157 with 160.
_HELD = 160
_BYTES = {"float64": 8, "float32": 4}


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def columns(problem: Problem) -> int:
    """The columns of a head in a tile: the pairs and the rest, each filled up to a power of two."""
    rest = int(problem.head_dim) - int(problem.rotary_dim)
    return 2 * _power(int(problem.rotary_dim) // 2) + (_power(rest) if rest else 0)


def heads(problem: Problem) -> int:
    """The heads of the wider side."""
    return max(int(problem.heads_q), int(problem.heads_k), 1)


def tile(config: Config, problem: Problem) -> int:
    """Elements of a tile."""
    return int(config.block_rows) * min(int(config.block), _power(heads(problem))) * columns(problem)


def elements_a_thread(config: Config, problem: Problem, device: Device) -> float:
    """Elements of a tile for each thread."""
    return tile(config, problem) / float(config.num_warps * device.limits.warp_size)


def _sums(problem: Problem) -> bool:
    """Whether a backward sums weights' gradients, for which it needs programs that loop."""
    return problem.op == "qk_norm_rope" and problem.phase == BACKWARD


def read_bytes(problem: Problem) -> int:
    """Bytes that a phase reads for each element of a tile."""
    width = max(_BYTES.get(str(problem.dtypes[name]), 2) for name in ("q", "cos"))
    return width * (2 if _sums(problem) else 1)


def extra_bytes(problem: Problem, config: Config) -> int:
    """Partial sums of the weights' gradients; 304 units of an MI300X, the most of any part, bound the programs."""
    if not _sums(problem):
        return 0
    return 2 * 4 * (int(config.programs_per_unit) * 304 + heads(problem)) * int(problem.head_dim)


def _constrained(space: ConfigSpace, most: int) -> ConfigSpace:
    fewest: int = min(space.parameters["num_warps"])  # type: ignore[type-var, assignment]
    tallest: int = max(space.parameters["block_rows"])  # type: ignore[type-var, assignment]
    widest: int = max(space.parameters["block"])  # type: ignore[type-var, assignment]
    least: int = min(space.parameters["block"])  # type: ignore[type-var, assignment]
    shortest: int = min(space.parameters["block_rows"])  # type: ignore[type-var, assignment]

    def enough(config: Config, problem: Problem, device: Device) -> bool:
        # Heads of a few columns cannot give a thread its share; there the largest tile with the fewest warps is legal.
        largest = config.num_warps == fewest and config.block_rows == tallest
        largest = largest and config.block >= min(widest, _power(heads(problem)))
        return largest or elements_a_thread(config, problem, device) >= 4

    def few(config: Config, problem: Problem, device: Device) -> bool:
        # Heads of thousands of columns fill a program by themselves.
        smallest = config.block == least and config.block_rows == shortest
        warps: int = max(space.parameters["num_warps"])  # type: ignore[type-var, assignment]
        alone = smallest and config.num_warps == warps
        return alone or elements_a_thread(config, problem, device) <= most

    space = space.where(few, f"more than {most} elements a thread").where(enough, "fewer than 4 elements a thread")
    space = space.where(lambda c, p, d: c.block == least or c.block < 2 * heads(p), "a smaller block holds all heads")
    if "num_stages" not in space.parameters:
        return space
    space = space.where(
        lambda c, p, d: not _sums(p) or (c.num_stages > 1) == (c.programs_per_unit < 4),
        "few programs with loads ahead, or many without",
    )
    return space.where(
        lambda c, p, d: (c.num_stages - 1) * tile(c, p) * read_bytes(p) + 4096 <= d.limits.shared_memory,
        "its loads ahead do not fit shared memory",
    )


def constrain_tokens(space: ConfigSpace, most: int = 64) -> ConfigSpace:
    """All heads of some tokens a program."""
    space = _constrained(space, most).where(
        lambda c, p, d: -(-heads(p) // c.block) <= _UNROLLED, "too many blocks of heads for one program's code"
    )
    space = space.where(
        lambda c, p, d: _sums(p) or (c.num_stages > 1) == (c.programs_per_unit > 0),
        "loads run ahead in programs that loop, and only there",
    )
    least: int = min(space.parameters["block_rows"])  # type: ignore[type-var, assignment]
    space = space.where(
        lambda c, p, d: _sums(p) or c.block_rows == least or _all_elements(c, p, d) <= _HELD,
        f"more than {_HELD} elements of all its heads a thread",
    )
    return space.where(
        lambda c, p, d: _sums(p) or _ahead(c, p) <= d.limits.shared_memory,
        "the loads ahead of all its heads do not fit shared memory",
    )


def _all_elements(config: Config, problem: Problem, device: Device) -> float:
    """Elements of all heads of a tile's tokens for each thread: blocks of heads are unrolled and loaded together."""
    held = int(config.block_rows) * (int(problem.heads_q) + int(problem.heads_k)) * columns(problem)
    return held / float(config.num_warps * device.limits.warp_size)


def _ahead(config: Config, problem: Problem) -> int:
    """Bytes in flight of all heads of a tile's tokens, their cosines and sines, and 16 KiB to change layouts in.

    Exact but for the last: 344,064 bytes for 16 tokens of 32 + 8 heads of 128 two ahead, to which the compiler adds
    none, and at most 12,288 to other tiles.
    """
    if config.num_stages == 1:
        return 0
    rows = (int(config.num_stages) - 1) * int(config.block_rows)
    return rows * (int(problem.heads_q) + int(problem.heads_k) + 2) * columns(problem) * read_bytes(problem) + 16384


def constrain_heads(space: ConfigSpace, most: int = 64) -> ConfigSpace:
    """Blocks of heads of some tokens a program."""
    return _constrained(space, most)


def nearest(space: ConfigSpace, by_heads: bool, problem: Problem, device: Device) -> Config:
    """The legal config that differs least, in powers of two, from the wanted one."""
    aim = wanted(by_heads, problem, device)

    def distance(config: Config) -> float:
        off = 0.0
        for name, value in config.items():
            off += abs(math.log2(int(value) + 1) - math.log2(int(aim.get(name, value)) + 1))  # type: ignore[arg-type]
        return off

    return min(space.configs(problem, device), key=distance, default=aim)


def wanted(by_heads: bool, problem: Problem, device: Device) -> Config:
    """Tiles of 4096 elements with 16 to 32 a thread: a token of 32 heads of 128, or 16 tokens of 2 heads."""
    block = min(2 if by_heads else 32, _power(heads(problem)))
    rows = max(1, min(64, 4096 // (block * columns(problem))))
    if _sums(problem):
        # 8 warps with sums beside two tiles of 4096 take about 100 registers a thread, so two programs fill a unit.
        ahead = device.vendor != "rocm"
        return Config(
            block=block,
            block_rows=rows,
            num_warps=8,
            num_stages=2 if ahead else 1,
            programs_per_unit=2 if ahead else 4,
        )
    warps = max(1, min(8, block * rows * columns(problem) // (32 * device.limits.warp_size)))
    return Config(block=block, block_rows=rows, num_warps=warps, num_stages=1, programs_per_unit=0)
