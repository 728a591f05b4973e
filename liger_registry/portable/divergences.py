"""``jsd``, ``kl_div`` and ``tvd`` in PyTorch operations; formulas and reductions are those of their contracts.

Forward functions take ``(input, target, shift_labels)`` with input and target (..., vocab), labels (...) or None, and
return ``(loss, scale)``; backward ones take ``(grad_loss, input, target, shift_labels, scale)`` and return
``(grad_input,)``, or None in its place. Which operation it is shows in its options: ``beta`` has ``jsd`` alone,
``log_target`` and ``eps`` ``kl_div``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device

_COUNTED = ("mean", "batchmean")


def forward_eager(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    *,
    device: Device,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The formula, one operation after the other."""
    found = _terms(*_wide(x, target), options)
    if labels is not None:
        found.masked_fill_((labels == ignore_index).unsqueeze(-1), 0.0)
    dtype = _loss_dtype(x, options)
    if reduction == "none":
        return _laid_out_like(x, found.to(dtype)), None
    scale = _scale(x, labels, reduction, ignore_index)
    return (found.sum() * _factor(x, reduction, scale)).to(dtype), scale


def backward_eager(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> tuple[Tensor | None]:
    """The derivative of each element, times the upstream gradient."""
    if not needs[0]:
        return (None,)
    found = _slopes(*_wide(x, target), options)
    found.mul_(grad if reduction == "none" else grad.to(found.dtype) * _factor(x, reduction, scale))
    if labels is not None:
        found.masked_fill_((labels == ignore_index).unsqueeze(-1), 0.0)
    return (_laid_out_like(x, found.to(x.dtype)),)


def forward_row_chunks(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    *,
    device: Device,
    slab_rows: int,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The formula over slabs of ``slab_rows`` rows."""
    vocab, dtype, elementwise = x.shape[-1], _loss_dtype(x, options), reduction == "none"
    rows = zip(*(torch.split(t.reshape(-1, vocab), slab_rows) for t in (x, target)), strict=True)
    ignored = None if labels is None else torch.split(labels.reshape(-1, 1) == ignore_index, slab_rows)
    out = x.new_empty(math.prod(x.shape[:-1]), vocab, dtype=dtype) if elementwise else None
    parts = [x.new_zeros((), dtype=_sums(x, target))]
    for number, pair in enumerate(rows):
        found = _terms(*_wide(*pair), options)
        if ignored is not None:
            found.masked_fill_(ignored[number], 0.0)
        if out is None:
            parts.append(found.sum())
        else:
            out[number * slab_rows : number * slab_rows + len(found)].copy_(found)
    if out is not None:
        return _laid_out_like(x, out.view(x.shape)), None
    scale = _scale(x, labels, reduction, ignore_index)
    return (torch.stack(parts).sum() * _factor(x, reduction, scale)).to(dtype), scale


def backward_row_chunks(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    slab_rows: int,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> tuple[Tensor | None]:
    """The derivative over slabs of ``slab_rows`` rows."""
    if not needs[0]:
        return (None,)
    vocab, elementwise = x.shape[-1], reduction == "none"
    out = torch.empty_like(x, memory_format=torch.contiguous_format).view(-1, vocab)
    slabs = [torch.split(t.reshape(-1, vocab), slab_rows) for t in ((x, target, grad) if elementwise else (x, target))]
    ignored = None if labels is None else torch.split(labels.reshape(-1, 1) == ignore_index, slab_rows)
    upstream = grad.to(_sums(x, target)) * _factor(x, reduction, scale) if not elementwise else None
    for number, (of_x, of_target, *of_grad) in enumerate(zip(*slabs, strict=True)):
        found = _slopes(*_wide(of_x, of_target), options)
        found.mul_(upstream if upstream is not None else of_grad[0])
        if ignored is not None:
            found.masked_fill_(ignored[number], 0.0)
        out[number * slab_rows : number * slab_rows + len(found)].copy_(found)
    return (_laid_out_like(x, out.view(x.shape)),)


# --- formulas ---------------------------------------------------------------------------------------------------------


def _terms(x: Tensor, y: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Each element's term, in a tensor of its own; x and y are in the dtype of sums."""
    if "beta" in options:
        beta = options["beta"]
        if 0 < beta < 1:
            of_x, of_y = mixture(x, y, beta)
            return of_x.add_(of_y)
        return forward_kl(x, y) if beta == 0 else forward_kl(y, x)
    if "log_target" in options:
        if options["log_target"]:
            return forward_kl(x, y)
        logs = y.clamp_min(options["eps"]).log_().sub_(x)
        return logs.masked_fill_(y == 0, 0.0).mul_(y)
    return torch.sub(x, y).abs_().mul_(0.5)


def _slopes(x: Tensor, y: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The derivative of each term by x, in a tensor of its own."""
    if "beta" in options:
        beta = options["beta"]
        if 0 < beta < 1:
            return mixture(x, y, beta)[0]
        if beta == 0:
            return y.exp().neg_()
        q = x.exp()
        return torch.sub(x, y).add_(1).masked_fill_(q == 0, 0.0).mul_(q)
    if "log_target" in options:
        return y.exp().neg_() if options["log_target"] else y.neg()
    difference = torch.sub(x, y)
    return torch.where(difference.isnan(), difference, difference.sign()).mul_(0.5)


def forward_kl(x: Tensor, y: Tensor) -> Tensor:
    """``p (y - x)`` with p = exp(y); 0 where p is."""
    p = y.exp()
    return torch.sub(y, x).masked_fill_(p == 0, 0.0).mul_(p)


def mixture(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``((1 - beta) q (x - log m), beta p (y - log m))``, measured from the larger of x and y; see the kernels."""
    largest = torch.maximum(x, y)
    # Beyond -800 exponentials are 0 in float64 too; two of -inf have no gap, and count as one of -inf.
    gap = torch.sub(x, y).abs_().neg_().nan_to_num_(-800.0, -800.0, -800.0).clamp_min_(-800.0)
    higher = x >= y
    share = torch.full_like(x, 1 - beta).masked_fill_(higher, beta)
    log_m = torch.expm1(gap).mul_(share).log1p_()
    largest.exp_()
    upper = torch.sub(share, 1).mul_(log_m).mul_(largest)
    lower = gap.exp().mul_(share).mul_(gap.sub_(log_m)).mul_(largest)
    return torch.where(higher, upper, lower), torch.where(higher, lower, upper)


# --- reductions -------------------------------------------------------------------------------------------------------


def _sums(x: Tensor, target: Tensor) -> torch.dtype:
    wide = torch.float64 if torch.float64 in (x.dtype, target.dtype) else torch.float32
    return wide


def _wide(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of sums; neither is written."""
    dtype = _sums(x, target)
    return x.to(dtype), target.to(dtype)


def _loss_dtype(x: Tensor, options: Mapping[str, Any]) -> torch.dtype:
    keeps = "beta" in options or x.dtype == torch.float64
    return x.dtype if keeps else torch.float32


def _scale(x: Tensor, labels: Tensor | None, reduction: str, ignore_index: int) -> Tensor | None:
    """The factor on the sum, where it depends on how many rows count."""
    if labels is None or reduction not in _COUNTED:
        return None
    count = (labels != ignore_index).sum().clamp_min_(1)
    count = count.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return torch.reciprocal(count * x.shape[-1] if reduction == "mean" else count)


def _factor(x: Tensor, reduction: str, scale: Tensor | None) -> Any:  # noqa: ANN401 - a number, or a 0-dim tensor of one
    if scale is not None:
        return scale
    rows = max(math.prod(x.shape[:-1]), 1)
    return {"mean": 1.0 / (rows * x.shape[-1]), "batchmean": 1.0 / rows}.get(reduction, 1.0)


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives; nearly always it has them already."""
    if x.is_contiguous() and result.is_contiguous():
        return result
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    out = torch.empty_like(x, dtype=result.dtype, memory_format=layout)
    return result if result.stride() == out.stride() else out.copy_(result)
