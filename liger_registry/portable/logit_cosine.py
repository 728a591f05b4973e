"""``logit_cosine`` in PyTorch operations; the formula is that of ``ops.logit_cosine``.

Launch functions take ``(student, teacher, shift_labels, scale)`` with logits (rows, vocab), labels (rows,) or None,
scale 0-dim or None, and return ``(distance, nll, slope)``, None in place of what is not asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_registry.kernels.linear_products import row_slabs
from liger_registry.kernels.logit_cosine_heuristics import SHORTEST, rows_at_once
from liger_registry.portable._logits import apart, rest_of, target_columns

if TYPE_CHECKING:
    from liger_registry import Device


def forward_eager(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    soft: float,
    hard: float,
    cross_entropy: bool,
    ignore_index: int,
    gradient: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The formula, one operation after the other, of a few rows at a time: in fp32 a slab is gigabytes a step."""
    rows, vocab = student.shape
    dtype = torch.promote_types(student.dtype, torch.float32)
    distance = student.new_empty(rows, dtype=dtype)
    nll = torch.empty_like(distance) if cross_entropy else None
    slope = None
    if gradient:
        own = in_place and apart(student)
        slope = student if own else torch.empty_like(student, memory_format=torch.contiguous_format)
    for here in row_slabs(rows, rows_at_once(vocab)):
        target = None if labels is None else labels[here]
        ignored = None if target is None else target == ignore_index
        z = student[here].to(torch.promote_types(dtype, teacher.dtype))
        found, unscaled = _angle(z, teacher[here].to(z.dtype), soft, gradient)
        distance[here] = found if ignored is None else found.masked_fill_(ignored, 0.0)
        if nll is not None:
            assert target is not None
            assert ignored is not None
            likelihood, of_nll = _cross_entropy(z, target.long(), hard, gradient)
            nll[here] = likelihood.masked_fill_(ignored, 0.0)
            unscaled = None if unscaled is None or of_nll is None else unscaled.add_(of_nll)
        if slope is not None and unscaled is not None:
            unscaled = unscaled if scale is None else unscaled.mul_(scale)
            slope[here] = unscaled if ignored is None else unscaled.masked_fill_(ignored[:, None], 0.0)
    return distance, nll, slope


def _angle(s: Tensor, t: Tensor, weight: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """``1 - cos`` of rows and its gradient times the weight.

    With the unit vectors u and v it is ``|u - v|^2 / 2``, which is 0 with a gradient of 0 for equal rows, where
    ``1 - u . v`` is a rounding.
    """
    length, other = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (s, t))
    nothing = (length < SHORTEST) | (other < SHORTEST)
    length, other = (x.masked_fill(nothing, 1.0) for x in (length, other))
    u, v = s / length, t / other
    gap = v.sub_(u)
    half = gap.square().sum(-1, keepdim=True).div_(2)
    none = half - half  # 0, or NaN where either row has one
    slope = None
    if gradient:
        factor = torch.where(nothing, none, (-weight) / length)
        slope = gap.add_(u.mul_(half)).mul_(factor)
    return torch.where(nothing, 1.0 + none, half).squeeze(-1), slope


def _cross_entropy(z: Tensor, target: Tensor, weight: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The negative log-probabilities of targets and their gradient times the weight; NaN where a target is no class."""
    there, index = target_columns(target, z.shape[-1])
    log_rest, target_logit = rest_of(z, there, index)
    gap = (log_rest - target_logit).unsqueeze(-1)
    mark = torch.where(there, 1.0, torch.nan)
    nll = torch.logaddexp(gap, torch.zeros_like(gap)).mul_(mark).squeeze(-1)
    if not gradient:
        return nll, None
    factor = gap.sigmoid().mul_(mark).mul_(weight)
    anchor = log_rest.masked_fill(log_rest == -torch.inf, 0.0).unsqueeze(-1)
    slope = torch.sub(z, anchor).clamp_max_(0.0).exp_().mul_(factor)
    return nll, slope.scatter_(-1, index, -factor)
