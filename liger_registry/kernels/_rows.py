"""Rows of tensors whose leading dimensions have strides of their own, on the host and in kernels.

A kernel walks over rows of (..., hidden) tensors. Contiguous ones need no strides: ``ROW_DIMS`` is 0 and a row
starts at ``row * HIDDEN``. Others pass sizes and strides of up to four leading dimensions, coalesced over all tensors
of the launch, so a slice needs one and the (B, H, T, D) view of queries and keys three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

MOST_ROW_DIMS = 4

Strides = tuple[int | None, ...]
Vector = TypeVar("Vector", Tensor, "Tensor | None")


def allocate_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of x's shape: with the strides of x where its last dimension is contiguous, else contiguous."""
    if x.stride(-1) == 1:
        return torch.empty_like(x) if dtype is None else torch.empty_like(x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def dense_vector(vector: Vector) -> Vector:
    """A vector that kernels read without a stride: itself, or a copy where it is a column, a slice or expanded.

    A copy is fine here: of a weight it is a few KiB, which a launch of tens of MiB does not notice, while a stride
    would be an argument of every kernel. The check costs the hot path 45 ns.
    """
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def sums_by_tile(columns: int, rows: int, num_warps: int, device: Device) -> bool:
    """Whether a program that walks over tiles of rows keeps a sum for each place of a tile, not for each column.

    A sum over the rows of a tile goes through shared memory and has all warps wait, for each tile: of 524288 rows of
    128 the backward of layer_norm took 147 us on an H200, and 104 with one such sum at the end. Wide rows have few rows
    a tile, which a thread sums by itself; and registers have to hold the sums.
    """
    most = (16 if device.vendor == "rocm" else 32) * num_warps * device.limits.warp_size
    return columns < 1024 and rows * columns <= most


def strided(reads: tuple[Tensor, ...], writes: tuple[Tensor | None, ...]) -> tuple[int, Strides]:
    """How to find the rows of tensors of one shape, not all of them contiguous.

    Args:
        reads: tensors the kernel reads; each gets a column stride and four row strides.
        writes: tensors it writes, whose columns are contiguous; each gets four row strides, None for an absent one.

    Returns:
        ``ROW_DIMS``, and the arguments ``n1, n2, n3`` and strides that stand at the end of the kernels' signatures.
        ``ROW_DIMS`` beyond ``MOST_ROW_DIMS`` means that no kernel can walk over these rows.
    """
    present = [*reads, *(t for t in writes if t is not None)]
    sizes: list[int] = []
    strides: list[list[int]] = []  # of each dim, one a tensor
    for dim, size in enumerate(reads[0].shape[:-1]):
        if size == 1:
            continue
        steps = [t.stride(dim) for t in present]
        if sizes and strides[-1] == [step * size for step in steps]:
            sizes[-1] *= size
            strides[-1] = steps
        else:
            sizes.append(size)
            strides.append(steps)
    dims = max(len(sizes), 1)
    if dims > MOST_ROW_DIMS:
        return dims, ()
    # Innermost first: row // (all sizes before) % size counts along a dim; the outermost size is never needed.
    missing = MOST_ROW_DIMS - len(sizes)
    inner = [*reversed(sizes[1:]), *[1] * 3][:3]
    steps_of = {id(t): [*(s[i] for s in reversed(strides)), *[0] * missing] for i, t in enumerate(present)}
    arguments: list[int | None] = list(inner)
    for tensor in reads:
        arguments += [tensor.stride(-1), *steps_of[id(tensor)]]
    for written in writes:
        arguments += [None] * MOST_ROW_DIMS if written is None else steps_of[id(written)]
    return dims, tuple(arguments)


# Triton goes on reading behind a return in an `if` that it decides while compiling, hence an `else` for each.


@triton.jit
def row_ids(first, rows, BLOCK_ROWS: tl.constexpr):
    """The ids of a tile's rows, unsigned while 32 bits hold them: divisions of a row id then cost a third."""
    if rows.dtype == tl.int64:
        ids = tl.cast(first, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    else:
        ids = tl.cast(first, tl.uint32) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.uint32)
    return ids


@triton.jit
def row_offsets(row, HIDDEN: tl.constexpr, ROW_DIMS: tl.constexpr, n1, n2, n3, s0, s1, s2, s3):
    """Where rows start, in elements, int64: more than 2^31 elements are no exception."""
    if ROW_DIMS == 0:
        offset = row.to(tl.int64) * HIDDEN
    elif ROW_DIMS == 1:
        offset = row.to(tl.int64) * s0
    else:
        size = tl.cast(n1, row.dtype)
        offset = (row % size).to(tl.int64) * s0
        row = row // size
        if ROW_DIMS == 2:
            offset += row.to(tl.int64) * s1
        else:
            size = tl.cast(n2, row.dtype)
            offset += (row % size).to(tl.int64) * s1
            row = row // size
            if ROW_DIMS == 3:
                offset += row.to(tl.int64) * s2
            else:
                size = tl.cast(n3, row.dtype)
                offset += (row % size).to(tl.int64) * s2 + (row // size).to(tl.int64) * s3
    return offset


@triton.jit
def column_offsets(column, stride):
    """Where columns lie in a row; ``stride`` is None where they are contiguous."""
    return column if stride is None else column.to(tl.int64) * stride


@triton.jit(do_not_specialize=["count"])
def _sum_partials(P, OUT, count, HIDDEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, count, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        mask = (part < count)[:, None] & (column < HIDDEN)[None, :]
        total += tl.load(P + part.to(tl.int64)[:, None] * HIDDEN + column[None, :], mask=mask, other=0.0)
    tl.store(OUT + column, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=column < HIDDEN)


def sum_partials(partials: Tensor, like: Tensor, most: int) -> Tensor:
    """The sum of partial sums, in an order that never changes.

    Args:
        partials: (count, hidden), fp32.
        like: (hidden,), whose dtype the result takes.
        most: what ``count`` is where there are rows enough; it fixes the code, so that a new length compiles nothing.
    """
    count, hidden = partials.shape
    out = like.new_empty(hidden)
    # A second launch is worth its 2 us only if it is all latency: enough programs to fill the device, each with all
    # its loads in flight at once. 8 columns of fp32 are one 32-byte sector, the least that memory moves.
    columns = 32 if hidden >= 2048 else 8
    launch(
        _sum_partials,
        (-(-hidden // columns),),
        partials,
        out,
        count,
        HIDDEN=hidden,
        BLOCK_COLUMNS=columns,
        BLOCK_PARTS=min(1 << (most - 1).bit_length(), 16384 // columns),
        num_warps=8,
    )
    return out
