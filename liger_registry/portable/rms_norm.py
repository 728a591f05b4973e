"""``rms_norm`` in PyTorch operations; formula and roundings are those of ``liger_registry.ops.rms_norm``.

Launch functions take ``(x, weight)`` with x (..., hidden), weight (hidden,) or None, and return ``(y, rstd)``; backward
ones take ``(dy, x, weight, rstd)`` and return ``(dx, dweight)``, None where it is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device

    Gradients = tuple[Tensor | None, Tensor | None]


def _has_fused() -> bool:
    # Torch 2.9 gave the operator this signature; before it there was one for MPS alone.
    operator = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return operator is not None and any(a.name == "normalized_shape" for a in operator.default._schema.arguments)


#: Whether torch has a fused kernel, and on GPUs its backward.
FUSED = _has_fused()


def forward_eager(
    x: Tensor, weight: Tensor | None, *, device: Device, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """The formula, one operation after the other."""
    wide = x.to(_wide(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    if weight is None:
        y = normed.to(x.dtype)
    elif casting == "llama":
        y = _factor(weight, offset, casting) * normed.to(x.dtype)
    else:
        y = normed.mul_(_factor(weight, offset, casting, wide.dtype)).to(x.dtype)
    return _laid_out_like(x, y), rstd.reshape(-1)


def forward_functional(
    x: Tensor, weight: Tensor | None, *, device: Device, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Torch's fused kernel; where it would round otherwise than the family does, it normalises without the weight."""
    if not FUSED:
        return forward_eager(x, weight, device=device, eps=eps, offset=offset, casting=casting)
    one_rounding = weight is not None and casting != "llama" and offset == 0 and weight.dtype == x.dtype
    if weight is None or one_rounding:
        y, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
    elif casting == "llama":
        normed, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)
        y = _factor(weight, offset, casting) * normed
    else:
        # The weight's own dtype cannot hold offset + weight, so all of it goes through the statistics' dtype.
        wide = x.to(_wide(x.dtype))
        y, rstd = torch.ops.aten._fused_rms_norm(wide, x.shape[-1:], _factor(weight, offset, casting, wide.dtype), eps)
        y = y.to(x.dtype)
    return _laid_out_like(x, y), rstd.reshape(-1)


def forward_row_chunks(
    x: Tensor, weight: Tensor | None, *, device: Device, eps: float, offset: float, casting: str, slab_rows: int
) -> tuple[Tensor, Tensor]:
    """The formula over slabs of ``slab_rows`` rows; where x has no view as (rows, hidden), over all of it at once."""
    rows = _as_rows(x)
    if rows is None:
        return forward_eager(x, weight, device=device, eps=eps, offset=offset, casting=casting)
    llama, hidden = casting == "llama", x.shape[-1]
    dtype = x.dtype if weight is None or not llama else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=_layout(x))
    rstd = x.new_empty(len(rows), dtype=_wide(x.dtype))
    factor = None if weight is None else _factor(weight, offset, casting, None if llama else rstd.dtype)
    out = y.view(-1, hidden)
    slab_rows = min(slab_rows, len(rows))
    wide, squares = rstd.new_empty(2, slab_rows, hidden)
    narrow = x.new_empty(slab_rows if llama else 0, hidden)
    for start in range(0, len(rows), slab_rows or 1):
        into, scale = out[start : start + slab_rows], rstd[start : start + slab_rows]
        normed = wide[: len(into)].copy_(rows[start : start + slab_rows])
        # torch.linalg.vector_norm would read once, but sums 4,096 squares 16 times less exactly than `sum` does.
        torch.sum(torch.mul(normed, normed, out=squares[: len(into)]), -1, out=scale)
        scale.div_(hidden).add_(eps).rsqrt_()
        normed.mul_(scale[:, None])
        if factor is None:
            into.copy_(normed)
        elif llama:
            torch.mul(factor, narrow[: len(into)].copy_(normed), out=into)
        else:
            into.copy_(normed.mul_(factor))
    return y, rstd


def backward_eager(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool],
    eps: float,
    offset: float,
    casting: str,
) -> Gradients:
    """The derivative in the statistics' dtype, rounded once."""
    dx = dweight = None
    rstd = rstd.view(*x.shape[:-1], 1)
    normed = x * rstd  # promotes, because rstd is as wide as the statistics
    if needs[1] and weight is not None:
        dweight = (dy * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if needs[0]:
        scaled = dy.to(rstd.dtype) if weight is None else dy * _factor(weight, offset, casting, rstd.dtype)
        shift = (scaled * normed).mean(-1, keepdim=True)
        dx = _laid_out_like(x, torch.addcmul(scaled, normed, shift, value=-1).mul_(rstd).to(x.dtype))
    return dx, dweight


def backward_functional(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool],
    eps: float,
    offset: float,
    casting: str,
) -> Gradients:
    """Torch's fused backward; it needs the gradient, x and weight in one dtype."""
    wanted = [needs[0], needs[1] and weight is not None]
    if x.numel() == 0 or not any(wanted):
        return backward_eager(dy, x, weight, rstd, device=device, needs=needs, eps=eps, offset=offset, casting=casting)
    factor = weight
    if weight is not None and offset:
        factor = _factor(weight, offset, casting, None if casting == "llama" else rstd.dtype)
    if factor is not None and factor.dtype != x.dtype:
        # A factor of 1 + w in fp32: the fused kernel takes one dtype, so the narrow tensors go up to it.
        dy, x32 = dy.to(factor.dtype), x.to(factor.dtype)
    else:
        x32 = x
    shaped = rstd.view(*x.shape[:-1], 1)
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, x32, x.shape[-1:], shaped, factor, wanted)
    return (
        _laid_out_like(x, dx.to(x.dtype)) if wanted[0] else None,
        dweight.to(weight.dtype) if wanted[1] and weight is not None else None,
    )


def backward_row_chunks(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool],
    eps: float,
    offset: float,
    casting: str,
    slab_rows: int,
) -> Gradients:
    """The derivative over slabs of ``slab_rows`` rows; the weight's gradient is summed in the statistics' dtype."""
    rows, grads = _as_rows(x), _as_rows(dy)
    if rows is None or grads is None:
        return backward_eager(dy, x, weight, rstd, device=device, needs=needs, eps=eps, offset=offset, casting=casting)
    hidden = x.shape[-1]
    dx = torch.empty_like(x, memory_format=_layout(x)) if needs[0] else None
    out = None if dx is None else dx.view(-1, hidden)
    factor = None if weight is None else _factor(weight, offset, casting, rstd.dtype)
    total = rstd.new_zeros(hidden) if needs[1] and weight is not None else None
    slab_rows = min(slab_rows, len(rows))
    normed_buffer, grad_buffer, product_buffer = (rstd.new_empty(slab_rows, hidden) for _ in range(3))
    for start in range(0, len(rows), slab_rows or 1):
        slab = slice(start, start + slab_rows)
        scale = rstd[slab, None]
        count = len(scale)
        normed = normed_buffer[:count].copy_(rows[slab]).mul_(scale)
        scaled = grad_buffer[:count].copy_(grads[slab])
        if total is not None:
            total += torch.mul(scaled, normed, out=product_buffer[:count]).sum(0)
        if out is not None:
            if factor is not None:
                scaled.mul_(factor)
            shift = torch.mul(scaled, normed, out=product_buffer[:count]).sum(-1, keepdim=True).div_(hidden)
            out[slab].copy_(scaled.addcmul_(normed, shift, value=-1).mul_(scale))
    return dx, None if total is None or weight is None else total.to(weight.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _factor(weight: Tensor, offset: float, casting: str, dtype: torch.dtype | None = None) -> Tensor:
    """``offset + weight``, rounded as the family does it, then in ``dtype``."""
    if casting == "llama":
        factor = weight + offset if offset else weight
        return factor if dtype is None else factor.to(dtype)
    factor = weight.to(dtype)
    return factor + offset if offset else factor


def _layout(x: Tensor) -> torch.memory_format:
    return torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives; nearly always it has them already."""
    if x.is_contiguous() and result.is_contiguous():
        return result
    out = torch.empty_like(x, dtype=result.dtype, memory_format=_layout(x))
    return result if result.stride() == out.stride() else out.copy_(result)


def _as_rows(x: Tensor) -> Tensor | None:
    """x as (rows, hidden) without a copy, where that is possible."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None
