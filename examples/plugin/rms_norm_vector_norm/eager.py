"""The forward phase in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    device: Any,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)`` for x (..., hidden) and weight (hidden,) or None, with the roundings of the contract."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    rstd = torch.rsqrt(norm.square() / x.shape[-1] + eps)
    normed = x * rstd  # promotes to the statistics' dtype, without a copy of x in it
    if weight is None:
        y = normed.to(x.dtype)
    elif casting == "llama":
        y = normed.to(x.dtype) * (weight + offset if offset else weight)
    else:
        y = (normed * (weight.to(wide) + offset)).to(x.dtype)
    # The contract's layout: that of x where its last dimension is contiguous, else contiguous.
    return y if x.stride(-1) == 1 else y.contiguous(), rstd.reshape(-1)
