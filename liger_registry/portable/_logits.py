"""What losses over logits have in common in PyTorch: the transform of logits, and the softmax with its target apart."""

from __future__ import annotations

import torch
from torch import Tensor


def capped(logits: Tensor, softcap: float, scale: float = 1.0) -> Tensor:
    """``z`` in the statistics' dtype; the logits themselves where nothing is to be done, so not to be written."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scale != 1.0:
        z = z * scale
    if softcap:
        z = torch.div(z, softcap).tanh_().mul_(softcap)
    return z


def target_columns(target: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Whether rows have a target, and its column, 0 if not; each (rows, 1)."""
    there = ((target >= 0) & (target < vocab)).unsqueeze(-1)
    return there, target.unsqueeze(-1).where(there, 0)


def rest_of(z: Tensor, there: Tensor, index: Tensor, fused: bool = False) -> tuple[Tensor, Tensor]:
    """``(log_rest, target_logit)``, each (rows,): the log of the sum of the other exponentials, and the target's z.

    Args:
        z: (rows, vocab); it is read.
        there: (rows, 1), whether rows have a target.
        index: (rows, 1), its column.
        fused: by torch's logsumexp.
    """
    found = z.gather(-1, index)
    rest = z.clone(memory_format=torch.contiguous_format).scatter_(-1, index, found.masked_fill(there, -torch.inf))
    if fused:
        return rest.logsumexp(-1), found.where(there, 0.0).squeeze(-1)
    anchor = rest.amax(-1, keepdim=True)
    anchor.masked_fill_(anchor == -torch.inf, 0.0)
    log_rest = rest.sub_(anchor).exp_().sum(-1).log_().add_(anchor.squeeze(-1))
    return log_rest, found.where(there, 0.0).squeeze(-1)


def slope_into(dz: Tensor, logits: Tensor, softcap: float, scale: float = 1.0) -> None:
    """Multiply a gradient by the slope of ``capped``.

    ``1 - tanh^2`` loses all digits where the cap saturates; ``4 e / (1 + e)^2`` with ``e = exp(-2 |u|)`` keeps them.
    """
    if softcap:
        e = torch.mul(logits.to(dz.dtype), scale / softcap).abs_().mul_(-2.0).exp_()
        dz.mul_(e).div_(e.add_(1.0).square_()).mul_(4.0 * scale)
    elif scale != 1.0:
        dz.mul_(scale)


def written(dz: Tensor, logits: Tensor, in_place: bool) -> Tensor:
    """A gradient in the dtype of the logits, with their strides where their columns are contiguous, or in their memory.

    Memory that several elements share, as of an expanded tensor, is never written.
    """
    if in_place and apart(logits):
        return logits.detach().copy_(dz)
    layout = torch.preserve_format if logits.stride(-1) == 1 else torch.contiguous_format
    out = torch.empty_like(logits, memory_format=layout)
    if dz.dtype == out.dtype and dz.stride() == out.stride():
        return dz
    return out.copy_(dz)


def apart(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor share memory, as far as its strides show it."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True
