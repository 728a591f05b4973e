"""The two rates every bound is taken from, measured in the same run: a large copy and a large matrix product."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from benchmarks.timing import Clock

#: Bytes copied and the side of the product on a GPU; on a CPU sizes that take milliseconds.
COPY_BYTES, SIDE = 2 << 30, 8192
TINY_BYTES, TINY_SIDE = 4 << 20, 128


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches.

    Attributes:
        copy_tb_s: bytes read and written a second by a copy of 2 GiB, in TB/s.
        product_tflop_s: bf16 operations a second of a product of two random matrices of 8192 x 8192, in TFLOP/s. The
            card is power-limited there: zeros would be 13 % faster.
    """

    copy_tb_s: float
    product_tflop_s: float

    def to_json(self) -> dict[str, float]:
        """As JSON values."""
        return {"copy_tb_s": self.copy_tb_s, "product_tflop_s": self.product_tflop_s}


def measure(clock: Clock, device: torch.device, rounds: int = 10) -> Ceilings:
    """Both rates: medians of some samples, after some of each that do not count."""
    large = device.type == "cuda"
    size, side = (COPY_BYTES, SIDE) if large else (TINY_BYTES, TINY_SIDE)
    source = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = clock.events(lambda: target.copy_(source))
    copied = statistics.median(copy() for _ in range(rounds))
    source = target = source[:0]  # two GiB each
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = clock.events(lambda: torch.mm(a, b, out=out))
    for _ in range(rounds):
        product()
    multiplied = statistics.median(product() for _ in range(rounds))
    if large:
        torch.cuda.empty_cache()
    return Ceilings(2 * size / copied / 1e9, 2 * side**3 / multiplied / 1e9)
