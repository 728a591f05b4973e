"""Peak memory of a call beyond what was there before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

GIB = 1 << 30


def extra_gib(call: Callable[[], Any], kept: Callable[[Any], int] = lambda found: 0) -> float:
    """GiB at the peak of a call beyond what was there; gradients that it makes are counted. NaN without a GPU.

    Args:
        call: what is run once.
        kept: bytes of its results that are taken off the peak.
    """
    if not torch.cuda.is_available():
        call()
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return (peak - kept(found)) / GIB


def storage_bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    """Bytes that the allocator holds for some tensors, in its blocks of 512."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-size // 512) * 512 for size in sizes.values())
