"""Heads and tables of ``rope`` and ``qk_norm_rope`` on the host and in kernels.

A tile is [tokens, heads, pairs]. Heads are found by strides of batch, head and token, so that (batch, tokens, heads,
head_dim) in memory and (batch, heads, tokens, head_dim) are the same code. Strides vary with the length of a batch and
are not specialised on; that all of them are multiples of 16, as vector loads want it, is said by ``ALIGN``: the kernels
get strides in units of that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import column_offsets, row_ids

Column = int | None
# Strides and sizes that vary with the batch, in the kernels' signatures.
VARYING = ["tokens", "length", "q_column", "k_column", "cos_column", "sin_column"]
VARYING += [f"{name}_{dim}" for name in ("q", "k", "q_out", "k_out", "dq", "dk") for dim in ("batch", "head", "token")]
VARYING += [f"{name}_{dim}" for name in ("cos", "sin") for dim in ("batch", "token")]


def column_of(x: Tensor | None) -> Column:
    """The stride of the last dimension, None where it is contiguous."""
    return None if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.stride(-1)


def head_strides(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of batch, head and token, 0 along a single one, which may have any."""
    if x is None:
        return 0, 0, 0
    batch, head, token = (stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return batch, head, token


def table_strides(table: Tensor) -> tuple[int, int]:
    """Strides of batch and token; 0 for a batch that shares its rows."""
    shared = table.dim() == 2 or table.shape[0] == 1
    return 0 if shared else table.stride(0), table.stride(-2) if table.shape[-2] > 1 else 0


def in_units(strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """``ALIGN``, and the strides in units of it."""
    common = math.gcd(*strides)
    align = 16 if common % 16 == 0 else 8 if common % 8 == 0 else 1
    return align, tuple(stride // align for stride in strides)


def block_of(width: int) -> int:
    """The least power of two that holds so many."""
    return 1 << max(width - 1, 0).bit_length()


def tile_of(heads_q: int, heads_k: int, head_dim: int, rotary_dim: int, block: int) -> dict[str, Any]:
    """The constants of a tile of up to ``block`` heads."""
    rest = head_dim - rotary_dim
    return {
        "HEADS_Q": heads_q,
        "HEADS_K": heads_k,
        "BLOCK_Q": min(block, block_of(heads_q)),
        "BLOCK_K": min(block, block_of(heads_k)),
        "HEAD_DIM": head_dim,
        "ROTARY": rotary_dim,
        "BLOCK": block_of(rotary_dim // 2),
        "BLOCK_REST": block_of(rest) if rest else 0,
    }


def parts_of(tile: dict[str, Any]) -> int:
    """Into how many blocks the heads of queries and keys are cut."""
    return int(-(-tile["HEADS_Q"] // tile["BLOCK_Q"]) + -(-tile["HEADS_K"] // tile["BLOCK_K"]))


def empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty heads of x's shape, as the contract's ``allocate`` gives them."""
    if x.stride(-1) == 1:
        return torch.empty_like(x) if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@triton.jit
def token_ids(tile, tokens, length, TOKENS: tl.constexpr):
    """Tokens of a tile: their ids, which of them exist, and each one's batch and position."""
    token = row_ids(tile, tokens, TOKENS)
    size = tl.cast(length, token.dtype)
    return token, token < tl.cast(tokens, token.dtype), token // size, token % size


@triton.jit
def step(stride, ALIGN: tl.constexpr):
    """A stride in elements; the compiler sees that it is a multiple of ALIGN."""
    return tl.cast(stride, tl.int64) * ALIGN


@triton.jit
def row_pointers(X, batch, position, head, x_batch, x_head, x_token, ALIGN: tl.constexpr):
    """Where the heads of some tokens start, [tokens, heads, 1]."""
    row = batch.to(tl.int64) * step(x_batch, ALIGN) + position.to(tl.int64) * step(x_token, ALIGN)
    return X + (row[:, None] + (head.to(tl.int64) * step(x_head, ALIGN))[None, :])[:, :, None]


@triton.jit
def load_pairs(
    rows,
    mask,
    column,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """First and second columns of the pairs; neighbours come in one load, and are separated in registers."""
    if NEIGHBOURS:
        both = tl.arange(0, 2 * BLOCK)
        inside = mask & (both < 2 * PAIRS)[None, None, :]
        x = tl.load(rows + column_offsets(both, column)[None, None, :], mask=inside, other=0.0)
        first, second = tl.split(tl.reshape(x, (TOKENS, HEADS, BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)
        inside = mask & (pair < PAIRS)[None, None, :]
        first = tl.load(rows + column_offsets(pair, column)[None, None, :], mask=inside, other=0.0)
        second = tl.load(rows + column_offsets(pair + PAIRS, column)[None, None, :], mask=inside, other=0.0)
    return first, second


@triton.jit
def store_pairs(
    rows,
    mask,
    first,
    second,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """What ``load_pairs`` is for loads; columns are contiguous."""
    first, second = first.to(rows.dtype.element_ty), second.to(rows.dtype.element_ty)
    if NEIGHBOURS:
        both = tl.arange(0, 2 * BLOCK)
        inside = mask & (both < 2 * PAIRS)[None, None, :]
        x = tl.reshape(tl.join(first, second), (TOKENS, HEADS, 2 * BLOCK))
        tl.store(rows + both[None, None, :], x, mask=inside)
    else:
        pair = tl.arange(0, BLOCK)
        inside = mask & (pair < PAIRS)[None, None, :]
        tl.store(rows + pair[None, None, :], first, mask=inside)
        tl.store(rows + (pair + PAIRS)[None, None, :], second, mask=inside)


@triton.jit
def load_table(
    TABLE,
    batch,
    position,
    valid,
    t_batch,
    t_token,
    column,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ONE_A_PAIR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """cos or sin of both columns of the pairs in fp32, [tokens, 1, pairs]; loaded once for all heads of a token."""
    row = batch.to(tl.int64) * step(t_batch, ALIGN) + position.to(tl.int64) * step(t_token, ALIGN)
    rows, mask = TABLE + row[:, None, None], valid[:, None, None]
    if ONE_A_PAIR:
        pair = tl.arange(0, BLOCK)
        inside = mask & (pair < PAIRS)[None, None, :]
        first = tl.load(rows + column_offsets(pair, column)[None, None, :], mask=inside, other=0.0).to(tl.float32)
        second = first
    else:
        first, second = load_pairs(rows, mask, column, PAIRS, BLOCK, TOKENS, 1, NEIGHBOURS)
        first, second = first.to(tl.float32), second.to(tl.float32)
    return first, second


@triton.jit
def turn(a, b, cos_a, cos_b, sin_a, sin_b, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Turned pairs in fp32, each product rounded to ``dtype`` first unless ``WIDE``.

    The product of two bf16 or fp16 numbers is exact in fp32, so rounding it once is what PyTorch's product does.
    """
    first, first_sine = a * cos_a, b * sin_a
    second, second_sine = b * cos_b, a * sin_b
    if not WIDE:
        first, first_sine = first.to(dtype).to(tl.float32), first_sine.to(dtype).to(tl.float32)
        second, second_sine = second.to(dtype).to(tl.float32), second_sine.to(dtype).to(tl.float32)
    return first - first_sine, second + second_sine
