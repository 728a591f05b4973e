"""``rope`` in Triton; formula and roundings are those of ``liger_registry.ops.rope``.

Launch functions take ``(q, k, cos, sin)`` with q (batch, heads, tokens, head_dim), k likewise or None, and return
``(q_out, k_out, narrow)``; backward ones take ``(dq_out, dk_out, cos, sin, narrow)`` and return ``(dq, dk)``, None
where it is not needed. Both phases are one kernel: the derivative of a rotation is the rotation back. Everything is
read and written by strides; no layout of heads, tables or gradients is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rotary import (
    VARYING,
    column_of,
    empty_like,
    head_strides,
    in_units,
    load_pairs,
    load_table,
    parts_of,
    row_pointers,
    store_pairs,
    table_strides,
    tile_of,
    token_ids,
    turn,
)
from liger_registry.kernels._rows import column_offsets
from liger_registry.kernels.rms_norm import options_for
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Pair = tuple[Tensor | None, Tensor | None]


@triton.jit
def _tables(
    COS,
    SIN,
    batch,
    position,
    valid,
    cos_batch,
    cos_token,
    cos_column,
    sin_batch,
    sin_token,
    sin_column,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_A_PAIR: tl.constexpr,
    BACK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    cos_a, cos_b = load_table(
        COS, batch, position, valid, cos_batch, cos_token, cos_column,
        PAIRS, BLOCK, TOKENS, INTERLEAVED, ONE_A_PAIR, ALIGN,
    )  # fmt: skip
    sin_a, sin_b = load_table(
        SIN, batch, position, valid, sin_batch, sin_token, sin_column,
        PAIRS, BLOCK, TOKENS, INTERLEAVED, ONE_A_PAIR, ALIGN,
    )  # fmt: skip
    if BACK:  # transposed: the sine of a column goes to its partner
        sin_a, sin_b = -sin_b, -sin_a
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _rotate(
    X,
    Y,
    head,
    batch,
    position,
    valid,
    x_batch,
    x_head,
    x_token,
    x_column,
    y_batch,
    y_head,
    y_token,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TOKENS: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    mask = valid[:, None, None] & (head < COUNT)[None, :, None]
    x_rows = row_pointers(X, batch, position, head, x_batch, x_head, x_token, ALIGN)
    y_rows = row_pointers(Y, batch, position, head, y_batch, y_head, y_token, ALIGN)
    a, b = load_pairs(x_rows, mask, x_column, ROTARY // 2, BLOCK, TOKENS, HEADS, READ)
    a, b = turn(a.to(tl.float32), b.to(tl.float32), cos_a, cos_b, sin_a, sin_b, Y.dtype.element_ty, WIDE)
    store_pairs(y_rows, mask, a, b, ROTARY // 2, BLOCK, TOKENS, HEADS, WRITE)
    if BLOCK_REST > 0:
        column = ROTARY + tl.arange(0, BLOCK_REST)
        inside = mask & (column < HEAD_DIM)[None, None, :]
        rest = tl.load(x_rows + column_offsets(column, x_column)[None, None, :], mask=inside)
        tl.store(y_rows + column[None, None, :], rest.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _rope(
    Q,
    K,
    COS,
    SIN,
    Q_OUT,
    K_OUT,
    tokens,
    length,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    q_column,
    k_column,
    cos_column,
    sin_column,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    ONE_A_PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    BACK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    # PARTS is 0 where a program turns all heads of its tokens, else the number of blocks of heads.
    if PARTS == 0:
        first, programs = tl.program_id(0), tl.num_programs(0)
        part = 0
    else:
        # Blocks of the same tokens are neighbours, so that their rows of the tables are read while they are near.
        first, programs = tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
        part = tl.program_id(0) % PARTS
    PARTS_Q: tl.constexpr = (HEADS_Q + BLOCK_Q - 1) // BLOCK_Q
    for tile in tl.range(first, tl.cdiv(tokens, TOKENS), programs, num_stages=STAGES):
        _, valid, batch, position = token_ids(tile, tokens, length, TOKENS)
        cos_a, cos_b, sin_a, sin_b = _tables(
            COS, SIN, batch, position, valid, cos_batch, cos_token, cos_column, sin_batch, sin_token, sin_column,
            ROTARY // 2, BLOCK, TOKENS, INTERLEAVED, ONE_A_PAIR, BACK, ALIGN,
        )  # fmt: skip
        for block in tl.static_range(0, PARTS_Q if PARTS == 0 else 1):
            if PARTS == 0 or part < PARTS_Q:
                _rotate(
                    Q, Q_OUT, (part + block) * BLOCK_Q + tl.arange(0, BLOCK_Q), batch, position, valid,
                    q_batch, q_head, q_token, q_column, q_out_batch, q_out_head, q_out_token,
                    cos_a, cos_b, sin_a, sin_b,
                    HEADS_Q, BLOCK_Q, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, TOKENS, READ, WRITE, WIDE, ALIGN,
                )  # fmt: skip
        if HEADS_K > 0:
            for block in tl.static_range(0, (HEADS_K + BLOCK_K - 1) // BLOCK_K if PARTS == 0 else 1):
                if PARTS == 0 or part >= PARTS_Q:
                    _rotate(
                        K, K_OUT, (part + block - (0 if PARTS == 0 else PARTS_Q)) * BLOCK_K + tl.arange(0, BLOCK_K),
                        batch, position, valid,
                        k_batch, k_head, k_token, k_column, k_out_batch, k_out_head, k_out_token,
                        cos_a, cos_b, sin_a, sin_b,
                        HEADS_K, BLOCK_K, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, TOKENS, READ, WRITE, WIDE, ALIGN,
                    )  # fmt: skip


def _run(
    x: Tensor,
    other: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    other_out: Tensor | None,
    *,
    device: Device,
    back: bool,
    interleaved: bool,
    deinterleave: bool,
    half: bool,
    wide: bool,
    by_heads: bool,
    block: int,
    block_rows: int,
    num_warps: int,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> None:
    batch, heads, length, head_dim = x.shape
    tokens = batch * length
    if other is not None and other.shape[1] == 0:
        other = other_out = None
    if heads == 0:
        if other is None or other_out is None:
            return
        x, out, heads, other, other_out = other, other_out, other.shape[1], None, None
    tile = tile_of(heads, 0 if other is None else other.shape[1], head_dim, cos.shape[-1] * (2 if half else 1), block)
    parts = parts_of(tile) if by_heads else 0
    align, strides = in_units(
        (
            *head_strides(x),
            *head_strides(other),
            *head_strides(out),
            *head_strides(other_out),
            *table_strides(cos),
            *table_strides(sin),
        )
    )
    tiles = -(-tokens // block_rows)
    programs = min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles
    launch(
        _rope,
        (programs * max(parts, 1),),
        x,
        other,
        cos,
        sin,
        out,
        other_out,
        tokens,
        length,
        *strides,
        column_of(x),
        column_of(other),
        column_of(cos),
        column_of(sin),
        **tile,
        TOKENS=block_rows,
        PARTS=parts,
        STAGES=num_stages,
        INTERLEAVED=interleaved,
        READ=interleaved and not (deinterleave and back),
        WRITE=interleaved and not (deinterleave and not back),
        ONE_A_PAIR=half,
        WIDE=wide,
        BACK=back,
        ALIGN=align,
        num_warps=num_warps,
        enable_fp_fusion=False,  # PyTorch rounds each product, in fp32 too
        **options_for(device, waves_per_eu),
    )


def _forward(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, wide: bool, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q.dtype if wide or cos.dtype == q.dtype else torch.promote_types(q.dtype, cos.dtype)
    q_out = empty_like(q, dtype)
    k_out = q_out.new_empty(q.shape[0], 0, *q.shape[2:]) if k is None else empty_like(k, dtype)
    _run(q, k, cos, sin, q_out, None if k is None else k_out, back=False, wide=wide, **how)
    return q_out, k_out, q.new_empty(q.shape[0], 0)


def _backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    narrow: Tensor,
    needs: tuple[bool, bool],
    **how: Any,
) -> Pair:
    given = [g if need else None for g, need in zip((dq_out, dk_out), needs, strict=True)]
    found = [None if g is None else empty_like(g, narrow.dtype) for g in given]
    there = [(g, d) for g, d in zip(given, found, strict=True) if g is not None and d is not None]
    if there:
        (x, out), (other, other_out) = there[0], there[1] if len(there) > 1 else (None, None)
        _run(x, other, cos, sin, out, other_out, back=True, **how)
    return found[0], found[1]


def forward_tokens(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``block_rows`` tokens a program with all their heads, ``block`` heads at a time, so that tables are read once.

    With ``programs_per_unit`` of 0 a program a tile of tokens, else that many for each unit, with loads ahead.
    """
    return _forward(q, k, cos, sin, by_heads=False, **how)


def forward_heads(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``block_rows`` tokens by ``block`` heads a program: more programs for few tokens, longer runs of one head."""
    return _forward(q, k, cos, sin, by_heads=True, **how)


def backward_tokens(
    dq_out: Tensor | None, dk_out: Tensor | None, cos: Tensor, sin: Tensor, narrow: Tensor, **how: Any
) -> Pair:
    """As ``forward_tokens``, turned back."""
    return _backward(dq_out, dk_out, cos, sin, narrow, by_heads=False, **how)


def backward_heads(
    dq_out: Tensor | None, dk_out: Tensor | None, cos: Tensor, sin: Tensor, narrow: Tensor, **how: Any
) -> Pair:
    """As ``forward_heads``, turned back."""
    return _backward(dq_out, dk_out, cos, sin, narrow, by_heads=True, **how)
