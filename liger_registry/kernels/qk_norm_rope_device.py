"""The forward kernel of ``qk_norm_rope``, and what it shares with the backward one."""

from __future__ import annotations

import triton
import triton.language as tl

from liger_registry.kernels._rotary import VARYING, load_pairs, load_table, row_pointers, store_pairs, token_ids, turn
from liger_registry.kernels._rows import column_offsets
from liger_registry.kernels.rms_norm import factor_of, reciprocal_root


@triton.jit
def factors(
    W,
    offset,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """offset + weight for both columns of the pairs and for the rest, fp32, [1, 1, columns]."""
    pair, step, apart = tl.arange(0, BLOCK), 1, ROTARY // 2
    if INTERLEAVED:
        step, apart = 2, 1
    inside = pair < ROTARY // 2
    a = factor_of(tl.load(W + pair * step, mask=inside, other=0.0), offset, LLAMA)
    b = factor_of(tl.load(W + pair * step + apart, mask=inside, other=0.0), offset, LLAMA)
    if BLOCK_REST > 0:
        column = ROTARY + tl.arange(0, BLOCK_REST)
        rest = factor_of(tl.load(W + column, mask=column < HEAD_DIM, other=0.0), offset, LLAMA)
    else:
        rest = tl.zeros([1], tl.float32)
    return a[None, None, :], b[None, None, :], rest[None, None, :]


@triton.jit
def _scaled(normed, factor, dtype: tl.constexpr, LLAMA: tl.constexpr, KEEP: tl.constexpr):
    """The norm's result with its roundings, in fp32; KEEP says that it has the dtype of x, else it is fp32."""
    if LLAMA:
        normed = normed.to(dtype).to(tl.float32)
    normed = normed * factor
    if KEEP:
        normed = normed.to(dtype).to(tl.float32)
    return normed


@triton.jit
def _forward_block(
    X,
    Y,
    RSTD,
    head,
    token,
    batch,
    position,
    valid,
    eps,
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
    factor_a,
    factor_b,
    factor_rest,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LLAMA: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    there = valid[:, None] & (head < COUNT)[None, :]
    mask = there[:, :, None]
    x_rows = row_pointers(X, batch, position, head, x_batch, x_head, x_token, ALIGN)
    y_rows = row_pointers(Y, batch, position, head, y_batch, y_head, y_token, ALIGN)
    a, b = load_pairs(x_rows, mask, x_column, ROTARY // 2, BLOCK, TOKENS, HEADS, INTERLEAVED)
    a, b = a.to(tl.float32), b.to(tl.float32)
    squares = tl.sum(a * a + b * b, 2)
    if BLOCK_REST > 0:
        column = ROTARY + tl.arange(0, BLOCK_REST)
        inside = mask & (column < HEAD_DIM)[None, None, :]
        rest = tl.load(x_rows + column_offsets(column, x_column)[None, None, :], mask=inside, other=0.0)
        rest = rest.to(tl.float32)
        squares += tl.sum(rest * rest, 2)
    rstd = reciprocal_root(squares, eps, HEAD_DIM)
    tl.store(RSTD + token.to(tl.int64)[:, None] * COUNT + head[None, :], rstd, mask=there)
    rstd = rstd[:, :, None]
    a = _scaled(a * rstd, factor_a, X.dtype.element_ty, LLAMA, KEEP)
    b = _scaled(b * rstd, factor_b, X.dtype.element_ty, LLAMA, KEEP)
    a, b = turn(a, b, cos_a, cos_b, sin_a, sin_b, Y.dtype.element_ty, False)
    store_pairs(y_rows, mask, a, b, ROTARY // 2, BLOCK, TOKENS, HEADS, INTERLEAVED)
    if BLOCK_REST > 0:
        rest = _scaled(rest * rstd, factor_rest, X.dtype.element_ty, LLAMA, KEEP)
        tl.store(y_rows + column[None, None, :], rest.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def forward(
    Q,
    K,
    Q_WEIGHT,
    K_WEIGHT,
    COS,
    SIN,
    Q_OUT,
    K_OUT,
    Q_RSTD,
    K_RSTD,
    tokens,
    length,
    eps,
    offset,
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
    LLAMA: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Results, and the reciprocal roots that backward reads."""
    # PARTS is 0 where a program has all heads of its tokens, else the number of blocks of heads.
    if PARTS == 0:
        start, programs, part = tl.program_id(0), tl.num_programs(0), 0
    else:
        start, programs = tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
        part = tl.program_id(0) % PARTS
    PARTS_Q: tl.constexpr = (HEADS_Q + BLOCK_Q - 1) // BLOCK_Q
    PARTS_K: tl.constexpr = (HEADS_K + BLOCK_K - 1) // BLOCK_K
    qa, qb, qr = factors(Q_WEIGHT, offset, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, INTERLEAVED, LLAMA)
    ka, kb, kr = factors(K_WEIGHT, offset, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, INTERLEAVED, LLAMA)
    for tile in tl.range(start, tl.cdiv(tokens, TOKENS), programs, num_stages=STAGES):
        token, valid, batch, position = token_ids(tile, tokens, length, TOKENS)
        cos_a, cos_b = load_table(
            COS, batch, position, valid, cos_batch, cos_token, cos_column,
            ROTARY // 2, BLOCK, TOKENS, INTERLEAVED, False, ALIGN,
        )  # fmt: skip
        sin_a, sin_b = load_table(
            SIN, batch, position, valid, sin_batch, sin_token, sin_column,
            ROTARY // 2, BLOCK, TOKENS, INTERLEAVED, False, ALIGN,
        )  # fmt: skip
        for block in tl.static_range(0, PARTS_Q if PARTS == 0 else 1):
            if PARTS == 0 or part < PARTS_Q:
                _forward_block(
                    Q, Q_OUT, Q_RSTD, (part + block) * BLOCK_Q + tl.arange(0, BLOCK_Q),
                    token, batch, position, valid, eps,
                    q_batch, q_head, q_token, q_column, q_out_batch, q_out_head, q_out_token,
                    cos_a, cos_b, sin_a, sin_b, qa, qb, qr,
                    HEADS_Q, BLOCK_Q, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, TOKENS, INTERLEAVED, LLAMA, KEEP, ALIGN,
                )  # fmt: skip
        for block in tl.static_range(0, PARTS_K if PARTS == 0 else 1):
            if PARTS == 0 or part >= PARTS_Q:
                _forward_block(
                    K, K_OUT, K_RSTD,
                    (part + block - (0 if PARTS == 0 else PARTS_Q)) * BLOCK_K + tl.arange(0, BLOCK_K),
                    token, batch, position, valid, eps,
                    k_batch, k_head, k_token, k_column, k_out_batch, k_out_head, k_out_token,
                    cos_a, cos_b, sin_a, sin_b, ka, kb, kr,
                    HEADS_K, BLOCK_K, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, TOKENS, INTERLEAVED, LLAMA, KEEP, ALIGN,
                )  # fmt: skip
