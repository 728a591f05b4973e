"""``qk_norm_rope`` in Triton; formula, roundings and saved tensors are those of ``liger_registry.ops.qk_norm_rope``.

Launch functions take ``(q, k, q_weight, k_weight, cos, sin)`` and return ``(q_out, k_out, q_rstd, k_rstd)``; backward
ones take ``(dq_out, dk_out)``, the inputs and ``(q_rstd, k_rstd)`` and return the gradients of q, k and the two
weights, None where it is not needed. Queries and keys are one launch, and the sums of both weights' gradients a second
one. Everything is read and written by strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from liger_registry.kernels._rotary import (
    column_of,
    empty_like,
    head_strides,
    in_units,
    parts_of,
    table_strides,
    tile_of,
)
from liger_registry.kernels._rows import dense_vector
from liger_registry.kernels.qk_norm_rope_back import backward, sum_both
from liger_registry.kernels.qk_norm_rope_device import forward
from liger_registry.kernels.rms_norm import options_for
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _most(programs_per_unit: int, parts: int, device: Device) -> int:
    """How many programs walk over the tokens at most, with all heads or for each of ``parts`` blocks of them."""
    return max(1, programs_per_unit * device.units // max(parts, 1))


def _grid(tokens: int, block_rows: int, programs_per_unit: int, parts: int, device: Device) -> int:
    tiles = -(-tokens // block_rows)
    return min(tiles, _most(programs_per_unit, parts, device)) if programs_per_unit else tiles


def _forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    device: Device,
    eps: float,
    offset: float,
    casting: str,
    interleaved: bool,
    by_heads: bool,
    block: int,
    block_rows: int,
    num_warps: int,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_weight, k_weight = dense_vector(q_weight), dense_vector(k_weight)
    batch, heads, length, head_dim = q.shape
    llama = casting == "llama"
    normed = torch.promote_types(q.dtype, q_weight.dtype) if llama and q_weight.dtype != q.dtype else q.dtype
    dtype = normed if cos.dtype == normed else torch.promote_types(normed, cos.dtype)
    q_out, k_out = empty_like(q, dtype), empty_like(k, dtype)
    q_rstd = q.new_empty(batch, length, heads, dtype=torch.float32)
    k_rstd = q.new_empty(batch, length, k.shape[1], dtype=torch.float32)
    tile = tile_of(heads, k.shape[1], head_dim, cos.shape[-1], block)
    parts = parts_of(tile) if by_heads else 0
    rows = (*head_strides(q), *head_strides(k), *head_strides(q_out), *head_strides(k_out))
    align, strides = in_units((*rows, *table_strides(cos), *table_strides(sin)))
    launch(
        forward,
        (_grid(batch * length, block_rows, programs_per_unit, parts, device) * max(parts, 1),),
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        q_out,
        k_out,
        q_rstd,
        k_rstd,
        batch * length,
        length,
        eps,
        offset,
        *strides,
        column_of(q),
        column_of(k),
        column_of(cos),
        column_of(sin),
        **tile,
        TOKENS=block_rows,
        PARTS=parts,
        STAGES=num_stages,
        INTERLEAVED=interleaved,
        LLAMA=llama,
        KEEP=normed == q.dtype,
        ALIGN=align,
        num_warps=num_warps,
        enable_fp_fusion=False,  # as in rope: ptxas may take a product in bf16 unrounded
        **options_for(device, waves_per_eu),
    )
    return q_out, k_out, q_rstd, k_rstd


def _backward(
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
    eps: float,
    offset: float,
    casting: str,
    interleaved: bool,
    by_heads: bool,
    block: int,
    block_rows: int,
    num_warps: int,
    programs_per_unit: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> Gradients:
    if not any(needs):
        return None, None, None, None
    q_weight, k_weight = dense_vector(q_weight), dense_vector(k_weight)
    batch, _, length, head_dim = q.shape
    dq, dk = empty_like(q, q.dtype) if needs[0] else None, empty_like(k, k.dtype) if needs[1] else None
    # A side of which nothing is needed has no heads here.
    heads_q = q.shape[1] if needs[0] or needs[2] else 0
    heads_k = k.shape[1] if needs[1] or needs[3] else 0
    tile = tile_of(heads_q, heads_k, head_dim, cos.shape[-1], block)
    parts = parts_of(tile) if by_heads else 0
    programs = _grid(batch * length, block_rows, programs_per_unit, parts, device)
    # By heads, a program has sums of one side alone, and each block of that side's heads has its own.
    each = (-(-heads_q // tile["BLOCK_Q"]), -(-heads_k // tile["BLOCK_K"])) if by_heads else (1, 1)
    q_sums, k_sums = (
        q.new_empty(programs * n, head_dim, dtype=torch.float32) if need else None
        for n, need in zip(each, needs[2:], strict=True)
    )
    read = (*head_strides(dq_out), *head_strides(dk_out), *head_strides(q), *head_strides(k))
    written = (*head_strides(dq), *head_strides(dk))
    align, strides = in_units((*read, *written, *table_strides(cos), *table_strides(sin)))
    launch(
        backward,
        (programs * max(parts, 1),) if heads_q or heads_k else (0,),
        dq_out,
        dk_out,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        q_rstd,
        k_rstd,
        dq,
        dk,
        q_sums,
        k_sums,
        batch * length,
        length,
        offset,
        *strides,
        column_of(dq_out),
        column_of(dk_out),
        column_of(q),
        column_of(k),
        column_of(cos),
        column_of(sin),
        **tile,
        TOKENS=block_rows,
        PARTS=parts,
        STAGES=num_stages,
        INTERLEAVED=interleaved,
        LLAMA=casting == "llama",
        ALIGN=align,
        num_warps=num_warps,
        **options_for(device, waves_per_eu),
    )
    most = _most(programs_per_unit, parts, device) * max(each)
    return dq, dk, *_sums(q_sums, k_sums, q_weight, k_weight, most)


def _sums(
    q_sums: Tensor | None, k_sums: Tensor | None, q_weight: Tensor, k_weight: Tensor, most: int
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of both weights in one launch, summed in an order that never changes."""
    found = [None if p is None else w.new_empty(w.shape) for p, w in ((q_sums, q_weight), (k_sums, k_weight))]
    there = [(p, out) for p, out in zip((q_sums, k_sums), found, strict=True) if p is not None]
    if there:
        (first, out), (second, other) = there[0], there[-1]
        head_dim = q_weight.shape[0]
        launch(
            sum_both,
            (-(-head_dim // 8), len(there)),
            first,
            second,
            out,
            other,
            first.shape[0],
            second.shape[0],
            HEAD_DIM=head_dim,
            BLOCK_COLUMNS=8,
            BLOCK_PARTS=min(triton.next_power_of_2(most), 2048),
            num_warps=8,
        )
    return found[0], found[1]


def forward_tokens(*tensors: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``block_rows`` tokens a program with all their heads, ``block`` heads at a time, so that tables are read once.

    With ``programs_per_unit`` of 0 a program a tile of tokens, else that many for each unit, with loads ahead.
    """
    return _forward(*tensors, by_heads=False, **how)


def forward_heads(*tensors: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``block_rows`` tokens by ``block`` heads a program."""
    return _forward(*tensors, by_heads=True, **how)


def backward_tokens(*tensors: Tensor, **how: Any) -> Gradients:
    """Few programs that walk over the tokens, all heads of each, with their sums of both weights in registers."""
    return _backward(*tensors, by_heads=False, **how)


def backward_heads(*tensors: Tensor, **how: Any) -> Gradients:
    """Few programs for each block of heads, whose sums are of one weight alone and take half the registers."""
    return _backward(*tensors, by_heads=True, **how)
