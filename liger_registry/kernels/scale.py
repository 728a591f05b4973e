"""Gradients that forward holds, times that of the loss, which is nearly always 1: then nothing is read or written.

Launch functions take what ``liger_registry.portable.fused_linear_cross_entropy.backward_scale`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit(do_not_specialize=["count"])
def _scale(X, Y, Factor, count, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    factor = tl.load(Factor).to(tl.float32)
    total = tl.cast(count, tl.int64)
    # Decided on the device: the host would have to wait for it.
    if (factor != 1.0) | (not IN_PLACE):
        for block in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
            offset = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offset < total
            x = tl.load(X + offset, mask=inside).to(tl.float32)
            tl.store(Y + offset, (x * factor).to(Y.dtype.element_ty), mask=inside)


def backward_scale_unless_one(
    grad_loss: Tensor,
    grad_z_loss: None,
    grad_token_accuracy: None,
    grad_predicted_tokens: None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    held_hidden: Tensor | None,
    held_weight: Tensor | None,
    held_bias: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool, ...],
    block: int,
    num_warps: int,
    programs_per_unit: int,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Forward's gradients times the loss', in fp32 and in their own memory, handed over."""
    found: list[Tensor | None] = []
    for held, like, need in zip((held_hidden, held_weight, held_bias), (hidden, weight, bias), needs, strict=True):
        if held is None or like is None or not need:
            found.append(None)
            continue
        out = held if held.dtype == like.dtype else torch.empty_like(held, dtype=like.dtype)
        count = held.numel()
        if count:
            grid = (min(triton.cdiv(count, block), device.units * programs_per_unit),)
            launch(
                _scale,
                grid,
                held,
                out,
                grad_loss,
                count,
                BLOCK=block,
                IN_PLACE=out is held,
                num_warps=num_warps,
            )
        found.append(out)
    return tuple(found)
