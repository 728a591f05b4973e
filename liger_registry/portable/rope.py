"""``rope`` in PyTorch operations; formula and roundings are those of ``liger_registry.ops.rope``.

Launch functions take ``(q, k, cos, sin)`` with q (batch, heads, tokens, head_dim), k likewise or None, and return
``(q_out, k_out, narrow)``; backward ones take ``(dq_out, dk_out, cos, sin, narrow)`` and return ``(dq, dk)``, None
where it is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device

    Pair = tuple[Tensor | None, Tensor | None]


def forward_eager(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, device: Device, **options: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The models' formula, one operation after the other."""
    q_out = _laid_out_like(q, turn_heads(q, cos, sin, **options))
    k_out = _no_heads(q_out) if k is None else _laid_out_like(k, turn_heads(k, cos, sin, **options))
    return q_out, k_out, q.new_empty(q.shape[0], 0)


def forward_halves(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, device: Device, **options: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Both columns of the pairs written into the result, without a copy of the turned heads."""
    dtype = q.dtype if options["wide"] else torch.promote_types(q.dtype, cos.dtype)
    q_out = turn_halves(q, cos, sin, dtype, back=False, **options)
    k_out = _no_heads(q_out) if k is None else turn_halves(k, cos, sin, dtype, back=False, **options)
    return q_out, k_out, q.new_empty(q.shape[0], 0)


def backward_eager(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    narrow: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool],
    **options: bool,
) -> Pair:
    """The derivative of the formula, with its roundings."""
    found = [
        _laid_out_like(g, turn_back(g, cos, sin, narrow.dtype, **options)) if g is not None and need else None
        for g, need in zip((dq_out, dk_out), needs, strict=True)
    ]
    return found[0], found[1]


def backward_halves(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    narrow: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool],
    **options: bool,
) -> Pair:
    """Both columns of the pairs turned back into the result."""
    found = [
        turn_halves(g, cos, sin, narrow.dtype, back=True, **options) if g is not None and need else None
        for g, need in zip((dq_out, dk_out), needs, strict=True)
    ]
    return found[0], found[1]


def turn_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    deinterleave: bool = False,
    half: bool = False,
    wide: bool = False,
) -> Tensor:
    """Heads turned as the models write it."""
    cos, sin = _over_heads(cos), _over_heads(sin)
    width = cos.shape[-1] * 2 if half else cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if wide:
        turned = turned.to(_wide(x.dtype))
    if deinterleave:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        cos, sin = _of_both(cos, interleaved, half), _of_both(sin, interleaved, half)
        a, b = _pairs(turned, width, interleaved)
        turned = (turned * cos).add_(_joined(-b, a, interleaved).mul(sin))
    return torch.cat((turned.to(x.dtype) if wide else turned, rest), -1)


def turn_back(
    g: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    interleaved: bool = False,
    deinterleave: bool = False,
    half: bool = False,
    wide: bool = False,
) -> Tensor:
    """The gradient of heads of a dtype: each product rounded to it, then the sum; once if ``wide``."""
    cos, sin = _over_heads(cos), _over_heads(sin)
    width = cos.shape[-1] * 2 if half else cos.shape[-1]
    turned, rest = g[..., :width], g[..., width:].to(dtype)
    term = _wide(dtype) if wide else dtype
    if deinterleave:
        a, b = _pairs(turned.to(term) if wide else turned, width, False)
        first = (a * cos).to(term) + (b * sin).to(term)
        turned = _joined(first, (b * cos).to(term) - (a * sin).to(term), True)
    else:
        cos, sin = _of_both(cos, interleaved, half), _of_both(sin, interleaved, half)
        turned = turned.to(term) if wide else turned
        a, b = _pairs((turned * sin).to(term), width, interleaved)
        turned = (turned * cos).to(term).add_(_joined(b, -a, interleaved))
    return torch.cat((turned.to(dtype), rest), -1)


def turn_halves(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    *,
    back: bool,
    interleaved: bool = False,
    deinterleave: bool = False,
    half: bool = False,
    wide: bool = False,
) -> Tensor:
    """Heads of a dtype, turned either way: what ``turn_heads`` and ``turn_back`` give, by the pairs' columns."""
    cos, sin = _over_heads(cos), _over_heads(sin)
    width = cos.shape[-1] * 2 if half else cos.shape[-1]
    out = _empty_like(x, dtype)
    term = _wide(dtype) if wide else dtype
    a, b = _pairs(x, width, interleaved and not (deinterleave and back))
    into_a, into_b = _pairs(out, width, interleaved and not (deinterleave and not back))
    cos_a, cos_b = (cos, cos) if half else _pairs(cos, width, interleaved)
    sin_a, sin_b = (sin, sin) if half else _pairs(sin, width, interleaved)
    if back:
        sin_a, sin_b = -sin_b, -sin_a
    if wide:
        a, b = a.to(term), b.to(term)
    if term == dtype:
        torch.sub((a * cos_a).to(term), (b * sin_a).to(term), out=into_a)
        torch.add((b * cos_b).to(term), (a * sin_b).to(term), out=into_b)
    else:
        into_a.copy_(a * cos_a - b * sin_a)
        into_b.copy_(b * cos_b + a * sin_b)
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
    return out


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _over_heads(table: Tensor) -> Tensor:
    """A table as heads broadcast with it."""
    return table.unsqueeze(1) if table.dim() == 3 else table


def _of_both(table: Tensor, interleaved: bool, half: bool) -> Tensor:
    """A table of full width, from one of a column a pair."""
    if not half:
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second columns of the pairs."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _no_heads(q_out: Tensor) -> Tensor:
    return q_out.new_empty(q_out.shape[0], 0, *q_out.shape[2:])


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives."""
    out = _empty_like(x, result.dtype)
    return result if result.stride() == out.stride() else out.copy_(result)
