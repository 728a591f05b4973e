"""``qk_norm_rope`` in PyTorch operations; formula and roundings are those of ``liger_registry.ops.qk_norm_rope``.

Launch functions take ``(q, k, q_weight, k_weight, cos, sin)`` and return ``(q_out, k_out, q_rstd, k_rstd)``; backward
ones take ``(dq_out, dk_out)``, the inputs and ``(q_rstd, k_rstd)`` and return the gradients of q, k and the two
weights, None where it is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.portable import rms_norm
from liger_registry.portable.rope import turn_back, turn_halves

if TYPE_CHECKING:
    from liger_registry import Device

    Results = tuple[Tensor, Tensor, Tensor, Tensor]
    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def forward_eager(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    device: Device,
    interleaved: bool,
    **norm: Any,
) -> Results:
    """The norm's formula, then the rotation."""
    return _forward(rms_norm.forward_eager, (q, q_weight), (k, k_weight), cos, sin, interleaved, device=device, **norm)


def forward_functional(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    device: Device,
    interleaved: bool,
    **norm: Any,
) -> Results:
    """Torch's fused norm where it rounds as the family does, then the rotation."""
    return _forward(
        rms_norm.forward_functional, (q, q_weight), (k, k_weight), cos, sin, interleaved, device=device, **norm
    )


def _forward(
    normalise: Callable[..., tuple[Tensor, Tensor]],
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    **norm: Any,
) -> Results:
    outputs, saved = [], []
    for x, weight in (queries, keys):
        batch, heads, tokens, _ = x.shape
        normed, rstd = normalise(x, weight, **norm)
        dtype = torch.promote_types(normed.dtype, cos.dtype)
        outputs.append(turn_halves(normed, cos, sin, dtype, back=False, interleaved=interleaved))
        saved.append(rstd.new_empty(batch, tokens, heads).copy_(rstd.view(batch, heads, tokens).transpose(1, 2)))
    return outputs[0], outputs[1], saved[0], saved[1]


def backward_eager(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool, bool, bool],
    interleaved: bool,
    **norm: Any,
) -> Gradients:
    """The gradients turned back, then the norm's derivative, in the statistics' dtype and rounded once."""
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for g, x, weight, rstd, need in (
        (dq_out, q, q_weight, q_rstd, (needs[0], needs[2])),
        (dk_out, k, k_weight, k_rstd, (needs[1], needs[3])),
    ):
        if not any(need):
            found.append((None, None))
            continue
        dy = turn_back(g.to(rstd.dtype), cos, sin, rstd.dtype, interleaved)
        rows = rstd.transpose(1, 2).reshape(-1)
        found.append(rms_norm.backward_eager(dy, x, weight, rows, device=device, needs=need, **norm))
    return found[0][0], found[1][0], found[0][1], found[1][1]
