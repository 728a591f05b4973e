"""``logit_statistics`` in PyTorch operations; the formula is that of ``liger_registry.ops.logit_statistics``.

Launch functions take ``(logits, target, class_weight)`` and return ``(log_rest, target_logit, weighted_sum, mean_logit,
best, prediction)``, each (rows,) or None; backward ones take their gradients, the inputs and ``(log_rest, target_logit,
mean_logit)`` and return ``(grad_logits,)``, which is the logits' own memory with ``in_place``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_registry.portable._logits import capped, rest_of, slope_into, target_columns, written

if TYPE_CHECKING:
    from liger_registry import Device


def forward_eager(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    *,
    device: Device,
    softcap: float,
    scale: float,
    weighted: bool,
    entropy: bool,
    predict: bool,
    in_place: bool,
) -> tuple[Tensor | None, ...]:
    """The formula, one operation after the other."""
    z = capped(logits, softcap, scale)
    there, index = target_columns(target, z.shape[-1])
    weighted_sum = mean_logit = best = prediction = None
    if weighted:
        weighted_sum = z.sum(-1) if class_weight is None else (z * class_weight.to(z.dtype)).sum(-1)
    if predict:
        # By the logits before the cap, which makes large ones equal.
        order = capped(logits, 0.0, scale) if softcap else z
        prediction = order.max(-1).indices
        best = z.gather(-1, prediction[:, None]).squeeze(-1)
    if entropy:
        mean_logit = (torch.softmax(z, -1) * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    log_rest, target_logit = rest_of(z, there, index)
    return log_rest, target_logit, weighted_sum, mean_logit, best, prediction


def backward_eager(
    g_log_rest: Tensor | None,
    g_target_logit: Tensor | None,
    g_weighted_sum: Tensor | None,
    g_mean_logit: Tensor | None,
    g_best: None,
    g_prediction: None,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    log_rest: Tensor,
    target_logit: Tensor,
    mean_logit: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    softcap: float,
    scale: float,
    weighted: bool,
    entropy: bool,
    predict: bool,
    in_place: bool,
) -> tuple[Tensor | None]:
    """The derivative in the statistics' dtype, rounded once."""
    if not needs[0]:
        return (None,)
    z = capped(logits, softcap, scale)
    there, index = target_columns(target, z.shape[-1])
    if g_log_rest is None:
        dz = torch.zeros_like(z, memory_format=torch.contiguous_format)
    else:
        dz = _shares(z, log_rest).mul_(g_log_rest[:, None])
    # Rows without a target write what stands there already.
    own = torch.zeros_like(target_logit) if g_target_logit is None else g_target_logit.to(z.dtype)
    dz.scatter_(-1, index, torch.where(there, own[:, None], dz.gather(-1, index)))
    if g_weighted_sum is not None:
        dz.add_(
            g_weighted_sum[:, None] if class_weight is None else torch.outer(g_weighted_sum, class_weight.to(z.dtype))
        )
    if g_mean_logit is not None:
        assert mean_logit is not None
        total = torch.where(there.squeeze(-1), torch.logaddexp(log_rest, target_logit), log_rest)
        p = _shares(z, total).mul_(g_mean_logit[:, None])
        steps = torch.sub(z, mean_logit[:, None] - 1.0).masked_fill_(z == -torch.inf, 0.0)
        dz.addcmul_(p, steps)
    slope_into(dz, logits, softcap, scale)
    return (written(dz, logits, in_place),)


def _shares(z: Tensor, log: Tensor) -> Tensor:
    """``exp(z - log)``, at most 1 also where z was computed again and rounded another way; 0 of -inf in both."""
    return torch.sub(z, log.masked_fill(log == -torch.inf, 0.0)[:, None]).clamp_max_(0.0).exp_()
