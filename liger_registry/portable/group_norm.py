"""``group_norm`` in PyTorch operations; formula and roundings are those of ``liger_registry.ops.group_norm``.

Launch functions take ``(x, weight, bias)`` with x (batch, channels, *spatial), weight and bias (channels,) or None, and
return ``(y, mean, rstd)``; backward ones take ``(dy, x, weight, bias, mean, rstd)`` and return
``(dx, dweight, dbias)``, None where it is not needed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward_eager(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, one operation after the other."""
    wide = x.to(_wide(x.dtype)).reshape(x.shape[0], groups, _size(x, groups))
    mean = wide.mean(-1, keepdim=True)
    y = wide - mean
    rstd = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y.mul_(rstd).view(x.shape)
    if weight is not None:
        y = y.mul_(_column(weight, x))
    if bias is not None:
        y = y.add_(_column(bias, x))
    return _laid_out_like(x, y.to(x.dtype)), mean[..., 0], rstd[..., 0]


def forward_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own kernel, with vectors in fp32, so that the statistics come in fp32 too.

    On a GPU it takes one dtype for all tensors, so there x goes to fp32 first.
    """
    x32, weight, bias = _as_torch_takes(x, weight, bias)
    sizes = (x.shape[0], x.shape[1], math.prod(x.shape[2:]))
    y, mean, rstd = torch.ops.aten.native_group_norm(x32, weight, bias, *sizes, groups, eps)
    return _laid_out_like(x, y.to(x.dtype)), mean, rstd


def backward_eager(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, device: Device,
    needs: tuple[bool, bool, bool], groups: int, eps: float,
) -> Gradients:  # fmt: skip
    """The derivative in the statistics' dtype, rounded once."""
    dx = dweight = dbias = None
    shape = (x.shape[0], groups, _size(x, groups))
    over = [d for d in range(x.dim()) if d != 1]
    if needs[2] and bias is not None:
        dbias = dy.sum(over, dtype=rstd.dtype).to(bias.dtype)
    if needs[0] or (needs[1] and weight is not None):
        wide = dy.to(rstd.dtype)
        normed = (x.reshape(shape) - mean[..., None]).mul_(rstd[..., None])  # promotes: the statistics are wide
        if needs[1] and weight is not None:
            dweight = (wide * normed.view(x.shape)).sum(over).to(weight.dtype)
        if needs[0]:
            scaled = (wide if weight is None else wide * _column(weight, x)).reshape(shape)
            slope = (scaled * normed).mean(-1, keepdim=True)
            found = (scaled - scaled.mean(-1, keepdim=True)).sub_(normed.mul_(slope)).mul_(rstd[..., None])
            dx = _laid_out_like(x, found.view(x.shape).to(x.dtype))
    return dx, dweight, dbias


def backward_functional(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, device: Device,
    needs: tuple[bool, bool, bool], groups: int, eps: float,
) -> Gradients:  # fmt: skip
    """Torch's own kernel, in the dtypes of ``forward_functional``, but for the bias.

    On the CPU its sum over the positions loses twice as much as ``torch.sum``, and without a weight it crashes there.
    """
    dbias = None
    if needs[2] and bias is not None:
        dbias = dy.sum([d for d in range(x.dim()) if d != 1], dtype=rstd.dtype).to(bias.dtype)
    wanted = [needs[0], needs[1] and weight is not None, False]
    if not any(wanted):
        return None, None, dbias
    x32, vector, _ = _as_torch_takes(x, weight, None)
    sizes = (x.shape[0], x.shape[1], math.prod(x.shape[2:]))
    dx, dweight, _ = torch.ops.aten.native_group_norm_backward(
        dy.to(x32.dtype).contiguous(), x32, mean.contiguous(), rstd.contiguous(), vector, *sizes, groups, wanted
    )
    return (
        _laid_out_like(x, dx.to(x.dtype)) if wanted[0] else None,
        dweight.to(weight.dtype) if weight is not None and wanted[1] else None,
        dbias,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _size(x: Tensor, groups: int) -> int:
    return x.shape[1] // groups * math.prod(x.shape[2:])


def _column(vector: Tensor, x: Tensor) -> Tensor:
    """A value for each channel in the statistics' dtype, to be broadcast over x."""
    return vector.to(_wide(x.dtype)).view(-1, *[1] * (x.dim() - 2))


def _as_torch_takes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Contiguous x in a dtype that torch's kernel takes with vectors in the statistics' dtype, and those vectors.

    The vectors' dtype is also that of the statistics, hence a weight of ones for 16 bits where there is none.
    """
    dtype = _wide(x.dtype)
    if weight is None and x.dtype != dtype:
        weight = torch.ones(x.shape[1], dtype=dtype, device=x.device)
    vectors = (None if v is None else v.to(dtype).contiguous() for v in (weight, bias))
    return (x.contiguous() if x.device.type == "cpu" else x.to(dtype).contiguous(), *vectors)  # type: ignore[return-value]


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives; nearly always it has them already."""
    if x.is_contiguous() and result.is_contiguous():
        return result
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    out = torch.empty_like(x, memory_format=layout)
    return result if result.stride() == out.stride() else out.copy_(result)
