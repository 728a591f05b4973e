"""What ``logit_cosine`` costs on a device, and which config to take where nothing was measured. Needs no Triton.

What is worth compiling is what is of ``logit_divergence``, which walks over the same two slabs.
"""

from __future__ import annotations

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.problem import Problem

#: The least length of a row that has a direction.
SHORTEST = 1e-12
#: Numbers that a part of a row leaves for the next launch: three products, the squared difference, a maximum and a sum.
PARTS = 6
#: Numbers of a row that the launch for the gradient gets.
NUMBERS = 4
#: Bytes of one fp32 copy of the rows that PyTorch operations work on at once, and how many copies there are of them:
#: both logits, their unit vectors, the difference's squares, and the gradient of the cross-entropy.
AT_ONCE, COPIES = 32 << 20, 6


def rows_at_once(vocab: int) -> int:
    """How many rows PyTorch operations work on at once."""
    return max(1, AT_ONCE // (4 * max(vocab, 1)))


def split_bytes(problem: Problem, config: Config) -> int:
    """Scratch between the launches: of each part of a row, of each row, and the target's logit."""
    return 4 * int(problem.rows) * (PARTS * int(config.splits) + NUMBERS + 1)


def heuristic_row(problem: Problem, device: Device) -> Config:
    """Blocks of 4096 columns, 8 elements a thread: 40 registers on sm_90, so that a unit holds three programs."""
    block = 4096 if problem.vocab > 4096 else 1024
    return Config(block=block, num_warps=max(4, block // (8 * device.limits.warp_size)), num_stages=1)


def heuristic_column_split(problem: Problem, device: Device) -> Config:
    """As many splits as give each unit four programs."""
    block, splits = 2048 if problem.vocab > 4096 else 1024, 1
    while splits < 16 and splits * problem.rows < 4 * device.units and (splits * 2 - 1) * block < problem.vocab:
        splits *= 2
    return Config(block=block, num_warps=max(4, block // (8 * device.limits.warp_size)), splits=splits)
