"""``softmax`` in PyTorch operations; formula and roundings are those of ``liger_registry.ops.softmax``.

Launch functions take ``x`` (..., width) and return ``(y,)``; backward ones take ``(dy, y)`` and return ``(dx,)``, None
where it is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device


def forward_eager(x: Tensor, *, device: Device) -> tuple[Tensor]:
    """The formula, one operation after the other."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    terms = torch.sub(wide, wide.amax(-1, keepdim=True)).exp_()
    return (_laid_out_like(x, terms.div_(terms.sum(-1, keepdim=True)).to(x.dtype)),)


def forward_functional(x: Tensor, *, device: Device) -> tuple[Tensor]:
    """Torch's own kernel."""
    return (_laid_out_like(x, torch.softmax(x, -1)),)


def backward_eager(dy: Tensor, y: Tensor, *, device: Device, needs: tuple[bool]) -> tuple[Tensor | None]:
    """The derivative in the statistics' dtype, rounded once."""
    if not needs[0]:
        return (None,)
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    shift = (dy * wide).sum(-1, keepdim=True)
    return (_laid_out_like(y, torch.sub(dy, shift).mul_(wide).to(y.dtype)),)


def backward_functional(dy: Tensor, y: Tensor, *, device: Device, needs: tuple[bool]) -> tuple[Tensor | None]:
    """Torch's own kernel."""
    if not needs[0]:
        return (None,)
    return (_laid_out_like(y, torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)),)


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives; nearly always it has them already."""
    if x.is_contiguous() and result.is_contiguous():
        return result
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    out = torch.empty_like(x, memory_format=layout)
    return result if result.stride() == out.stride() else out.copy_(result)
