"""The forward phase as a Triton kernel: one program and one block a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from liger_registry.launch import launch


@triton.jit
def _kernel(x, weight, y, rstd, hidden, eps, offset, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, LLAMA: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + tl.cast(eps, tl.float32))
    tl.store(rstd + row, scale)
    value = value * scale
    if LLAMA:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if WEIGHT:
        w = tl.load(weight + column, mask=inside, other=0.0)
        shift = tl.cast(offset, tl.float32)
        if LLAMA:
            # The model adds the offset in the weight's dtype.
            value = value * (w.to(tl.float32) + shift).to(weight.dtype.element_ty).to(tl.float32)
        else:
            value = value * (w.to(tl.float32) + shift)
    tl.store(y + row * hidden + column, value.to(y.dtype.element_ty), mask=inside)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    device: Any,
    eps: float,
    offset: float,
    casting: str,
    num_warps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)`` for x (..., hidden) and weight (hidden,) or None, float32, float16 or bfloat16."""
    llama = casting == "llama"
    x = x.contiguous()
    dtype = torch.promote_types(x.dtype, weight.dtype) if llama and weight is not None else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = x.shape[:-1].numel()
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    hidden = x.shape[-1]
    launch(
        _kernel,
        (rows,),
        x,
        x if weight is None else weight.contiguous(),
        y,
        rstd,
        hidden,
        eps,
        offset,
        BLOCK=triton.next_power_of_2(hidden),
        WEIGHT=weight is not None,
        LLAMA=llama,
        num_warps=num_warps,
    )
    return y, rstd
