"""The backward kernels of ``qk_norm_rope``."""

from __future__ import annotations

import triton
import triton.language as tl

from liger_registry.kernels._rotary import VARYING, load_pairs, load_table, row_pointers, store_pairs, token_ids
from liger_registry.kernels._rows import column_offsets
from liger_registry.kernels.qk_norm_rope_device import factors

_VARYING = [*VARYING, *(f"{n}_{dim}" for n in ("gq", "gk") for dim in ("batch", "head", "token", "column"))]
_VARYING_SUMS = ["first_count", "second_count"]


@triton.jit
def _backward_block(
    G,
    X,
    RSTD,
    DX,
    SUMS,
    head,
    token,
    batch,
    position,
    valid,
    g_batch,
    g_head,
    g_token,
    g_column,
    x_batch,
    x_head,
    x_token,
    x_column,
    dx_batch,
    dx_head,
    dx_token,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    factor_a,
    factor_b,
    factor_rest,
    total_a,
    total_b,
    total_rest,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    there = valid[:, None] & (head < COUNT)[None, :]
    mask = there[:, :, None]
    g_rows = row_pointers(G, batch, position, head, g_batch, g_head, g_token, ALIGN)
    x_rows = row_pointers(X, batch, position, head, x_batch, x_head, x_token, ALIGN)
    ga, gb = load_pairs(g_rows, mask, g_column, ROTARY // 2, BLOCK, TOKENS, HEADS, INTERLEAVED)
    xa, xb = load_pairs(x_rows, mask, x_column, ROTARY // 2, BLOCK, TOKENS, HEADS, INTERLEAVED)
    rstd = tl.load(RSTD + token.to(tl.int64)[:, None] * COUNT + head[None, :], mask=there, other=0.0)[:, :, None]
    ga, gb = ga.to(tl.float32), gb.to(tl.float32)
    # Turned back: the transposed rotation, in fp32.
    da, db = ga * cos_a + gb * sin_b, gb * cos_b - ga * sin_a
    xa, xb = xa.to(tl.float32) * rstd, xb.to(tl.float32) * rstd
    if BLOCK_REST > 0:
        column = ROTARY + tl.arange(0, BLOCK_REST)
        inside = mask & (column < HEAD_DIM)[None, None, :]
        dr = tl.load(g_rows + column_offsets(column, g_column)[None, None, :], mask=inside, other=0.0).to(tl.float32)
        xr = tl.load(x_rows + column_offsets(column, x_column)[None, None, :], mask=inside, other=0.0).to(tl.float32)
        xr *= rstd
    if SUMS is not None:
        total_a += da * xa
        total_b += db * xb
        if BLOCK_REST > 0:
            total_rest += dr * xr
    if DX is not None:
        da *= factor_a
        db *= factor_b
        shift = tl.sum(da * xa + db * xb, 2)
        if BLOCK_REST > 0:
            dr *= factor_rest
            shift += tl.sum(dr * xr, 2)
        shift = (shift / HEAD_DIM)[:, :, None]
        dx_rows = row_pointers(DX, batch, position, head, dx_batch, dx_head, dx_token, ALIGN)
        da, db = (da - xa * shift) * rstd, (db - xb * shift) * rstd
        store_pairs(dx_rows, mask, da, db, ROTARY // 2, BLOCK, TOKENS, HEADS, INTERLEAVED)
        if BLOCK_REST > 0:
            dr = (dr - xr * shift) * rstd
            tl.store(dx_rows + column[None, None, :], dr.to(DX.dtype.element_ty), mask=inside)
    return total_a, total_b, total_rest


@triton.jit
def _store_sums(
    SUMS,
    row,
    total_a,
    total_b,
    total_rest,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    pair, step, apart = tl.arange(0, BLOCK), 1, ROTARY // 2
    if INTERLEAVED:
        step, apart = 2, 1
    inside = pair < ROTARY // 2
    start = SUMS + row.to(tl.int64) * HEAD_DIM
    tl.store(start + pair * step, tl.sum(tl.sum(total_a, 1), 0), mask=inside)
    tl.store(start + pair * step + apart, tl.sum(tl.sum(total_b, 1), 0), mask=inside)
    if BLOCK_REST > 0:
        column = ROTARY + tl.arange(0, BLOCK_REST)
        tl.store(start + column, tl.sum(tl.sum(total_rest, 1), 0), mask=column < HEAD_DIM)


@triton.jit(do_not_specialize=_VARYING)
def backward(
    GQ,
    GK,
    Q,
    K,
    Q_WEIGHT,
    K_WEIGHT,
    COS,
    SIN,
    Q_RSTD,
    K_RSTD,
    DQ,
    DK,
    Q_SUMS,
    K_SUMS,
    tokens,
    length,
    offset,
    gq_batch,
    gq_head,
    gq_token,
    gk_batch,
    gk_head,
    gk_token,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    dq_batch,
    dq_head,
    dq_token,
    dk_batch,
    dk_head,
    dk_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    gq_column,
    gk_column,
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
    ALIGN: tl.constexpr,
):
    """Gradients of q and k, and each program's part of those of their weights."""
    if PARTS == 0:
        start, programs, part = tl.program_id(0), tl.num_programs(0), 0
    else:
        start, programs = tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
        part = tl.program_id(0) % PARTS
    PARTS_Q: tl.constexpr = (HEADS_Q + BLOCK_Q - 1) // BLOCK_Q
    PARTS_K: tl.constexpr = (HEADS_K + BLOCK_K - 1) // BLOCK_K
    REST: tl.constexpr = BLOCK_REST if BLOCK_REST > 0 else 1
    if HEADS_Q > 0:  # noqa: SIM102 - the compiler knows the first, and not the second
        if PARTS == 0 or part < PARTS_Q:
            fa, fb, fr = factors(Q_WEIGHT, offset, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, INTERLEAVED, LLAMA)
            ta = tl.zeros([TOKENS, BLOCK_Q, BLOCK], tl.float32)
            tb = tl.zeros([TOKENS, BLOCK_Q, BLOCK], tl.float32)
            tr = tl.zeros([TOKENS, BLOCK_Q, REST], tl.float32)
            # Queries first, then keys: the sums of one side alone are in registers at a time.
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
                    ta, tb, tr = _backward_block(
                        GQ, Q, Q_RSTD, DQ, Q_SUMS, (part + block) * BLOCK_Q + tl.arange(0, BLOCK_Q),
                        token, batch, position, valid,
                        gq_batch, gq_head, gq_token, gq_column, q_batch, q_head, q_token, q_column,
                        dq_batch, dq_head, dq_token, cos_a, cos_b, sin_a, sin_b, fa, fb, fr, ta, tb, tr,
                        HEADS_Q, BLOCK_Q, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, TOKENS, INTERLEAVED, ALIGN,
                    )  # fmt: skip
            if Q_SUMS is not None:
                row = start if PARTS == 0 else start * PARTS_Q + part
                _store_sums(Q_SUMS, row, ta, tb, tr, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, INTERLEAVED)
    if HEADS_K > 0:  # noqa: SIM102
        if PARTS == 0 or part >= PARTS_Q:
            own = part - (0 if PARTS == 0 else PARTS_Q)
            ka, kb, kr = factors(K_WEIGHT, offset, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, INTERLEAVED, LLAMA)
            sa = tl.zeros([TOKENS, BLOCK_K, BLOCK], tl.float32)
            sb = tl.zeros([TOKENS, BLOCK_K, BLOCK], tl.float32)
            sr = tl.zeros([TOKENS, BLOCK_K, REST], tl.float32)
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
                for block in tl.static_range(0, PARTS_K if PARTS == 0 else 1):
                    sa, sb, sr = _backward_block(
                        GK, K, K_RSTD, DK, K_SUMS, (own + block) * BLOCK_K + tl.arange(0, BLOCK_K),
                        token, batch, position, valid,
                        gk_batch, gk_head, gk_token, gk_column, k_batch, k_head, k_token, k_column,
                        dk_batch, dk_head, dk_token, cos_a, cos_b, sin_a, sin_b, ka, kb, kr, sa, sb, sr,
                        HEADS_K, BLOCK_K, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, TOKENS, INTERLEAVED, ALIGN,
                    )  # fmt: skip
            if K_SUMS is not None:
                row = start if PARTS == 0 else start * PARTS_K + own
                _store_sums(K_SUMS, row, sa, sb, sr, HEAD_DIM, ROTARY, BLOCK, BLOCK_REST, INTERLEAVED)


@triton.jit(do_not_specialize=_VARYING_SUMS)
def sum_both(
    FIRST,
    SECOND,
    FIRST_OUT,
    SECOND_OUT,
    first_count,
    second_count,
    HEAD_DIM: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """The columns' sums of two tensors of partial sums, (count, head_dim)."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < HEAD_DIM
    if tl.program_id(1) == 0:
        total = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, first_count, BLOCK_PARTS):
            part = start + tl.arange(0, BLOCK_PARTS)
            mask = (part < first_count)[:, None] & inside[None, :]
            total += tl.load(FIRST + part.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        tl.store(FIRST_OUT + column, tl.sum(total, 0).to(FIRST_OUT.dtype.element_ty), mask=inside)
    else:
        other = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, second_count, BLOCK_PARTS):
            part = start + tl.arange(0, BLOCK_PARTS)
            mask = (part < second_count)[:, None] & inside[None, :]
            other += tl.load(SECOND + part.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        tl.store(SECOND_OUT + column, tl.sum(other, 0).to(SECOND_OUT.dtype.element_ty), mask=inside)
