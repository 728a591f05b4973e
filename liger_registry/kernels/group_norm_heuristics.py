"""What ``group_norm`` costs on a device, and which config to take where nothing was measured; imports no Triton.

``block_rows`` counts the channels of a tile and ``block`` its positions. Backends declare parameters and values;
``constrain_*`` narrows them to what is worth compiling on any vendor.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.kernels.rms_norm_heuristics import nearest
from liger_registry.problem import BACKWARD, Problem

# Elements of a group that one program holds: 64 a thread of sixteen warps in forward, where x is all there is.
_MOST = 32768
# Elements of a tile: below, a unit idles between programs; above, registers do not hold it and its sums.
_TILE, _LARGEST_TILE = 1024, 4096


def group_size(problem: Problem) -> int:
    """Channels of a group."""
    return int(problem.channels) // int(problem.groups)


def elements(problem: Problem) -> int:
    """Elements of a group of one sample."""
    return group_size(problem) * int(problem.spatial)


def groups_of(problem: Problem) -> int:
    """Groups of all samples."""
    return int(problem.batch) * int(problem.groups)


def power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def whole_block(problem: Problem) -> int:
    """The block that holds the positions of a channel: its power of two, 16 at least unless there is but one."""
    return 1 if problem.spatial == 1 else max(16, power(int(problem.spatial)))


def constrain_whole(space: ConfigSpace) -> ConfigSpace:
    """Groups that registers hold, several small ones at a time; ``block_rows`` counts them."""
    fewest, tallest = min(space.parameters["num_warps"]), max(space.parameters["block_rows"])  # type: ignore[type-var]

    def tile(config: Config, problem: Problem) -> int:
        return int(config.block_rows) * power(group_size(problem)) * whole_block(problem)

    def a_thread(config: Config, problem: Problem, device: Device) -> float:
        return tile(config, problem) / (int(config.num_warps) * device.limits.warp_size)

    space = space.where(
        lambda c, p, d: tile(c, p) <= (_MOST >> (p.phase == BACKWARD) if c.block_rows == 1 else 4096),
        "registers do not hold a tile of this size",
    )
    # Backward holds dy and x.
    space = space.where(
        lambda c, p, d: a_thread(c, p, d) <= (32 if p.phase == BACKWARD else 64), "too many elements a thread"
    )
    return space.where(
        lambda c, p, d: a_thread(c, p, d) >= 4 or (c.num_warps == fewest and c.block_rows == tallest),
        "fewer than 4 elements a thread",
    )


def _blocks(problem: Problem) -> tuple[int, int]:
    """The most channels and positions of a tile that do not reach far beyond a group: its size, in steps of four."""

    def up(size: int) -> int:
        found = 1
        while found < size:
            found *= 4
        return found

    return up(group_size(problem)), 1 if problem.spatial == 1 else max(16, up(int(problem.spatial)))


def constrain_tiles(space: ConfigSpace) -> ConfigSpace:
    """Groups larger than a tile."""

    def tile(config: Config) -> int:
        return int(config.block_rows) * int(config.block)

    def largest(problem: Problem) -> int:
        most, wide = _blocks(problem)
        return min(most, 256) * min(wide, _LARGEST_TILE)

    space = space.where(lambda c, p, d: elements(p) > _TILE, "registers hold a group of this size")
    space = space.where(
        lambda c, p, d: (
            c.block_rows <= _blocks(p)[0] and (c.block == 1) == (p.spatial == 1) and c.block <= _blocks(p)[1]
        ),
        "a tile of this size reaches far beyond the group",
    )
    space = space.where(
        lambda c, p, d: min(_TILE, largest(p)) <= tile(c) <= _LARGEST_TILE, "a tile too small, or too large"
    )
    # Two sums and two tensors of a tile are in registers.
    space = space.where(
        lambda c, p, d: c.num_warps == 4 or tile(c) / (c.num_warps * d.limits.warp_size) >= 8,
        "too few for so many warps",
    )
    space = space.where(
        lambda c, p, d: tile(c) / (c.num_warps * d.limits.warp_size) <= 32, "more than 32 elements a thread"
    )
    return space.where(
        lambda c, p, d: c.get("num_stages", 1) == 1 or elements(p) > 4 * tile(c), "too few tiles to load any ahead"
    )


def constrain_split(space: ConfigSpace) -> ConfigSpace:
    """Few and large groups."""
    space = constrain_tiles(space).where(lambda c, p, d: elements(p) > 2048, "one program holds a group of this size")
    space = space.where(
        lambda c, p, d: p.phase == BACKWARD or (c.splits - 1) * c.block_rows * c.block < elements(p),
        "a split would have no tiles",
    )
    space = space.where(
        # Backward splits positions alone; each row of tiles has programs of its own.
        lambda c, p, d: p.phase != BACKWARD or c.splits == 1 or (c.splits - 1) * c.block < p.spatial,
        "a split would have no positions",
    )
    return space.where(
        lambda c, p, d: groups_of(p) <= 4 * d.units, "groups enough to fill the device are read without scratch between"
    )


def scratch_bytes(problem: Problem, config: Config) -> int:
    """Moments of parts between two launches; in backward sums of each channel, of parts where there are any."""
    splits = int(config.get("splits", 0))  # type: ignore[arg-type]
    if problem.phase != BACKWARD:
        return 12 * splits * groups_of(problem)
    vectors = sum(name in str(problem.needs).split(",") for name in ("weight", "bias"))
    means = 8 * groups_of(problem) if splits else 0
    return 4 * int(problem.batch) * int(problem.channels) * (2 * splits if splits else vectors) + means


def heuristic_whole(problem: Problem, device: Device) -> Config:
    """Tiles of 1024 elements or one group, 16 a thread: two loads of 16 bytes of bf16 in flight for each."""
    block = whole_block(problem)
    size = power(group_size(problem)) * block
    rows = max(1, min(32, 1024 // size))
    while rows > 1 and rows * 2 * device.units > groups_of(problem) and rows * size > 4 * device.limits.warp_size:
        rows //= 2
    most = device.limits.max_threads // device.limits.warp_size
    warps = max(1, min(16, most, rows * size // (16 * device.limits.warp_size)))
    return Config(block_rows=rows, num_warps=warps)


def heuristic_group(problem: Problem, device: Device) -> Config:
    """Tiles of 4096 elements, 16 to 32 a thread, with as many positions as 1024 of them, so that loads are wide."""
    channels, positions = _blocks(problem)
    block = min(1024, positions)
    return Config(block=block, block_rows=min(channels, 256, max(4096 // block, 1)), num_warps=8, num_stages=1)


def heuristic_split(problem: Problem, device: Device) -> Config:
    """The same tiles, and as many splits as give each unit four programs."""
    config = heuristic_group(problem, device).without("num_stages")
    splits = 16 if groups_of(problem) * 4 <= 2 * device.units else 4
    return Config({**config, "splits": splits})


def nearest_to(
    space: ConfigSpace, wanted: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    """The config of a space that is nearest to what a heuristic wants; itself wherever it is legal."""
    config = wanted(problem, device)
    return config if space.why_illegal(config, problem, device) is None else nearest(space, config, problem, device)
