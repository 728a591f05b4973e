"""``layer_norm`` in PyTorch operations; formula and roundings are those of ``liger_registry.ops.layer_norm``.

Launch functions take ``(x, weight, bias)`` with x (..., hidden), weight and bias (hidden,) or None, and return
``(y, mean, rstd)``; backward ones take ``(dy, x, weight, bias, mean, rstd)`` and return ``(dx, dweight, dbias)``, None
where it is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward_eager(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, one operation after the other."""
    wide = x.to(_wide(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    distance = wide - mean
    rstd = torch.rsqrt(distance.square().mean(-1, keepdim=True) + eps)
    y = distance.mul_(rstd)
    if weight is not None:
        y.mul_(weight.to(y.dtype))
    if bias is not None:
        y.add_(bias.to(y.dtype))
    return _laid_out_like(x, y.to(x.dtype)), mean.reshape(-1), rstd.reshape(-1)


def forward_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's fused kernel, for tensors of one dtype or, on a CPU, half-precision rows and fp32 vectors."""
    source, weight, bias = _as_torch_takes_them(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(source, x.shape[-1:], weight, bias, eps)
    return _laid_out_like(x, y.to(x.dtype)), mean.reshape(-1), rstd.reshape(-1)


def backward_eager(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool, bool],
    eps: float,
) -> Gradients:
    """The derivative in the statistics' dtype, rounded once."""
    dx = dweight = dbias = None
    hidden = x.shape[-1]
    dy = dy.to(rstd.dtype)
    mean, rstd = (t.reshape(*x.shape[:-1], 1) for t in (mean, rstd))
    if needs[2] and bias is not None:
        dbias = dy.reshape(-1, hidden).sum(0).to(bias.dtype)
    if needs[0] or (needs[1] and weight is not None):
        normed = (x - mean).mul_(rstd)
        if needs[1] and weight is not None:
            dweight = (dy * normed).reshape(-1, hidden).sum(0).to(weight.dtype)
        if needs[0]:
            scaled = dy if weight is None else dy * weight.to(dy.dtype)
            shift = (scaled * normed).mean(-1, keepdim=True)
            centred = scaled - scaled.mean(-1, keepdim=True)
            dx = _laid_out_like(x, centred.addcmul_(normed, shift, value=-1).mul_(rstd).to(x.dtype))
    return dx, dweight, dbias


def backward_functional(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool, bool],
    eps: float,
) -> Gradients:
    """Torch's fused backward; on a CPU in the statistics' dtype.

    There it sums the vectors' gradients in the dtype of x: of 70,001 rows in bf16 they are off by a quarter.
    """
    wanted = [needs[0], needs[1] and weight is not None, needs[2] and bias is not None]
    if not any(wanted):
        return None, None, None
    source, weights, biases = _as_torch_takes_them(x, weight, bias)
    if not x.is_cuda:
        source = source.to(rstd.dtype)
    statistics = (t.reshape(*x.shape[:-1], 1) for t in (mean, rstd))
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(source.dtype), source, x.shape[-1:], *statistics, weights, biases, wanted
    )
    return (
        _laid_out_like(x, dx.to(x.dtype)) if wanted[0] else None,
        dweight.to(weight.dtype) if wanted[1] and weight is not None else None,
        dbias.to(bias.dtype) if wanted[2] and bias is not None else None,
    )


def _as_torch_takes_them(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, weight and bias in dtypes for which torch's kernel takes and gives statistics in fp32 (float64: float64).

    On a GPU that is any one dtype. On a CPU half-precision rows have statistics of their own dtype unless the weight
    is in fp32, so there is one.
    """
    wide = _wide(x.dtype)
    if x.is_cuda and all(v is None or v.dtype == x.dtype for v in (weight, bias)):
        return x, weight, bias
    weight, bias = (None if v is None else v.to(wide) for v in (weight, bias))
    if x.dtype != wide and x.device.type == "cpu":
        return x, x.new_ones(x.shape[-1], dtype=wide) if weight is None else weight, bias
    return x.to(wide), weight, bias


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives; nearly always it has them already."""
    if x.is_contiguous() and result.is_contiguous():
        return result
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    out = torch.empty_like(x, memory_format=layout)
    return result if result.stride() == out.stride() else out.copy_(result)
