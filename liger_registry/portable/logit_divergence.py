"""``logit_divergence`` in PyTorch operations; the formula is that of ``ops.logit_divergence``.

Launch functions take ``(student, teacher, shift_labels, scale)`` with logits (rows, vocab), labels (rows,) or None,
scale 0-dim or None, and return ``(loss, slope)``, a slope of None where it is not asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_registry.portable.divergences import forward_kl, mixture

if TYPE_CHECKING:
    from liger_registry import Device


def forward_eager(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    beta: float,
    ignore_index: int,
    temperature: float,
    gradient: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """The formula, one operation after the other."""
    wide = torch.promote_types(student.dtype, torch.float32)
    x, y = ((t.to(wide) / temperature).log_softmax(-1) for t in (student, teacher))
    if 0 < beta < 1:
        of_x, of_y = mixture(x, y, beta)
        loss = of_y.add_(of_x).sum(-1)
        slope = torch.addcmul(of_x, x.exp_(), of_x.sum(-1, keepdim=True), value=-1) if gradient else None
    elif beta == 0:
        loss = forward_kl(x, y).sum(-1)
        slope = x.exp_().sub_(y.exp_()) if gradient else None
    else:
        terms = forward_kl(y, x)
        loss = terms.sum(-1)
        slope = torch.addcmul(terms, x.exp_(), loss[:, None], value=-1) if gradient else None
    ignored = None if labels is None else labels == ignore_index
    if ignored is not None:
        loss.masked_fill_(ignored, 0.0)
    if slope is None:
        return loss, None
    slope.mul_(1.0 / temperature if scale is None else scale / temperature)
    if ignored is not None:
        slope.masked_fill_(ignored[:, None], 0.0)
    if in_place:
        return loss, student.copy_(slope)
    return loss, slope.to(student.dtype).contiguous()
