"""What losses over logits cost on a device, and which config to take where nothing was measured; imports no Triton.

Backends declare parameters and values; ``constrain_*`` narrows them to what is worth compiling on any vendor.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.kernels.rms_norm_heuristics import nearest
from liger_registry.problem import FORWARD, Problem

_BYTES = {"float64": 8, "float32": 4}
# Shared memory that a tile's reductions take beside the loads ahead, at most.
_REDUCTION = 8192
# Flags with sums, or steps on the way to them, of their own.
_SUMS = (
    "capped",
    "weighted",
    "entropy",
    "predict",
    "smoothed",
    "return_token_accuracy",
    "return_predicted_tokens",
)
# The widest row that a program holds at once. Registers hold 32768, but on an H200 blocks in a loop were 1.5 to 2.3
# times as fast forward and 1.1 to 1.5 times backward for 8192 rows of 9600, 16128 and 32000.
WIDEST = 8192


def block_of(problem: Problem) -> int:
    """The block that holds a row."""
    return 1 << (int(problem.vocab) - 1).bit_length()


def split_bytes(problem: Problem, config: Config) -> int:
    """Scratch between the two launches of a split forward: five numbers and a column for each part of a row."""
    if problem.phase != FORWARD or "splits" not in config:
        return 0
    return 24 * int(problem.rows) * int(config.splits)


def loss_bytes(problem: Problem, config: Config) -> int:
    """Scratch of a loss over rows: weighted sums, predictions and losses of rows, partial sums, and those of parts."""
    return split_bytes(problem, config) + 20 * int(problem.rows) + 4096 if problem.phase == FORWARD else 0


def constrain_multi_row(space: ConfigSpace) -> ConfigSpace:
    """Rows that registers hold, several narrow ones at a time."""
    tallest, fewest = max(space.parameters["block_rows"]), min(space.parameters["num_warps"])  # type: ignore[type-var]

    def tile(config: Config, problem: Problem) -> int:
        return int(config.block_rows) * block_of(problem)

    def a_thread(config: Config, problem: Problem, device: Device) -> float:
        return tile(config, problem) / (int(config.num_warps) * device.limits.warp_size)

    space = space.where(lambda c, p, d: block_of(p) <= WIDEST, "registers do not hold the row")
    space = space.where(lambda c, p, d: c.block_rows == 1 or tile(c, p) <= 8192, "a wide row fills a program alone")
    # Compiled for sm_90 with 64 registers a thread, 32 elements spill 6 of them, with all sums at once 200.
    space = space.where(lambda c, p, d: a_thread(c, p, d) <= (16 if _busy(p) else 32), "too many elements a thread")
    return space.where(
        # A few columns cannot give a thread its share; there the tallest tile with the fewest warps is legal.
        lambda c, p, d: a_thread(c, p, d) >= 4 or (c.block_rows == tallest and c.num_warps == fewest),
        "fewer than 4 elements a thread",
    )


def constrain_looping(space: ConfigSpace) -> ConfigSpace:
    """A row a program at a time, in blocks; of narrow rows with the smallest config alone."""
    space = space.where(lambda c, p, d: c.block == 1024 or c.block < p.vocab, "a smaller block holds the row too")
    space = _filled(space)
    space = space.where(
        lambda c, p, d: p.vocab > 1024 or (c.num_warps == 4 and c.programs_per_unit == 0), "one block holds the row"
    )
    space = space.where(
        # From 512 threads on a unit's loads are enough, and 2048 are the most it runs.
        lambda c, p, d: (
            c.programs_per_unit == 0 or 512 <= c.programs_per_unit * c.num_warps * d.limits.warp_size <= 2048
        ),
        "too few threads a unit, or more than it runs",
    )
    space = space.where(
        lambda c, p, d: c.programs_per_unit > 0 or c.get("num_stages", 1) == 1, "many programs hide their loads anyway"
    )
    return space.where(
        lambda c, p, d: _ahead(c, p) + _REDUCTION <= d.limits.shared_memory, "its loads ahead do not fit shared memory"
    )


def constrain_column_split(space: ConfigSpace) -> ConfigSpace:
    """Few rows: several programs share one."""
    space = space.where(lambda c, p, d: (c.splits - 1) * c.block < p.vocab, "a split would have no columns")
    space = _filled(space)
    return space.where(lambda c, p, d: p.rows <= 8 * d.units, "rows enough to fill the device need no second launch")


def _busy(problem: Problem) -> bool:
    """Whether rows keep more than a maximum and a sum."""
    return any(problem.flags.get(name) for name in _SUMS)


def _filled(space: ConfigSpace) -> ConfigSpace:
    return space.where(
        lambda c, p, d: 4 <= c.block / (c.num_warps * d.limits.warp_size) <= 16, "too few elements a thread, or many"
    )


def _ahead(config: Config, problem: Problem) -> int:
    """Bytes of the loads that run ahead: a block for each stage but the first, with class weights two."""
    element = _BYTES.get(str(problem.dtypes["logits"]), 2)
    if problem.dtypes["class_weight"] != "none":
        element += _BYTES.get(str(problem.dtypes["class_weight"]), 2)
    return (int(config.get("num_stages", 1)) - 1) * int(config.block) * element  # type: ignore[arg-type]


def heuristic_multi_row(problem: Problem, device: Device) -> Config:
    """Tiles of 2048 elements or one row, 16 elements a thread; smaller tiles where few rows would idle units."""
    block = block_of(problem)
    rows = max(1, min(32, 2048 // block))
    while rows > 1 and rows * 2 * device.units > problem.rows and rows * block > 4 * device.limits.warp_size:
        rows //= 2
    most = device.limits.max_threads // device.limits.warp_size
    warps = max(1, min(32, rows * block // (16 * device.limits.warp_size), most))
    return Config(block_rows=rows, num_warps=warps, programs_per_unit=0)


def heuristic_looping(problem: Problem, device: Device) -> Config:
    """16 elements a thread, of the more threads the longer the row backward: what an H200 does best with.

    There 8192 rows of 9600, 16128, 32000 and 128256 in bf16 were tuned.
    """
    if problem.phase == FORWARD:
        block, threads = 2048, 128
    elif problem.vocab <= 12288:
        block, threads = 2048, 256
    else:
        block, threads = (4096, 256) if problem.vocab <= 65536 else (8192, 512)
    warps = max(4, threads // 32)
    return Config(block=block if block < problem.vocab else 1024, num_warps=warps, programs_per_unit=0, num_stages=1)


def heuristic_column_split(problem: Problem, device: Device) -> Config:
    """As many splits as give each unit four programs."""
    block = 2048 if problem.vocab > 8192 else 1024
    splits = 2
    while splits < 32 and splits * 2 * problem.rows <= 4 * device.units and (splits * 2 - 1) * block < problem.vocab:
        splits *= 2
    return Config(block=block, num_warps=4, splits=splits)


def nearest_to(
    space: ConfigSpace, wanted: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    """The config of a space that is nearest to what a heuristic wants; itself wherever it is legal."""
    config = wanted(problem, device)
    if space.why_illegal(config, problem, device) is None:
        return config
    return nearest(space, config, problem, device)
