"""``softmax`` in Triton for few and wide rows: several programs share a row.

What they have to know of each other goes through a small tensor between two launches: no atomics and no counters, so
results have the same bits every time, on any stream and in graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import allocate_like, column_offsets, row_offsets
from liger_registry.kernels.softmax import anchored, dot, maximum_and_sum, options_for, reciprocal, walk
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit
def _split(SPLITS: tl.constexpr):
    """The row and the part of it that this program works on, neighbours on one row."""
    return (tl.program_id(0) // SPLITS).to(tl.uint32), tl.program_id(0) % SPLITS


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _parts(
    X,
    PARTS,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
):
    row, part = _split(SPLITS)
    x_row = X + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    maximum, total = maximum_and_sum(x_row, part * BLOCK, SPLITS * BLOCK, WIDTH, BLOCK, 1, x_column)
    into = PARTS + row.to(tl.int64) * (2 * SPLITS) + part
    # A part of nothing but -inf has a sum of 0; its maximum must not stand above that of the others.
    tl.store(into, tl.where(total == 0.0, -float("inf"), maximum))
    tl.store(into + SPLITS, total)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _normalise(
    X,
    PARTS,
    Y,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
):
    row, part = _split(SPLITS)
    x_row = X + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    y_row = Y + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    parts = PARTS + row.to(tl.int64) * (2 * SPLITS) + tl.arange(0, SPLITS)
    maxima = tl.load(parts)
    anchor = anchored(tl.max(maxima, 0))
    scale = reciprocal(tl.sum(tl.load(parts + SPLITS) * tl.exp(maxima - anchor), 0))
    for first in range(part * BLOCK, WIDTH, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(y_row + column, (tl.exp(x - anchor) * scale).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _dots(
    DY,
    Y,
    DOTS,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    dy_column=None,
    dy0=None,
    dy1=None,
    dy2=None,
    dy3=None,
    y_column=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
):
    row, part = _split(SPLITS)
    dy_row = DY + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
    y_row = Y + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    total = dot(dy_row, y_row, part * BLOCK, SPLITS * BLOCK, WIDTH, BLOCK, 1, dy_column, y_column)
    tl.store(DOTS + row.to(tl.int64) * SPLITS + part, total)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _differentiate(
    DY,
    Y,
    DOTS,
    DX,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    dy_column=None,
    dy0=None,
    dy1=None,
    dy2=None,
    dy3=None,
    y_column=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
    dx0=None,
    dx1=None,
    dx2=None,
    dx3=None,
):
    row, part = _split(SPLITS)
    dy_row = DY + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
    y_row = Y + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    dx_row = DX + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
    shift = tl.sum(tl.load(DOTS + row.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)), 0)
    for first in range(part * BLOCK, WIDTH, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        dy = tl.load(dy_row + column_offsets(column, dy_column), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_row + column_offsets(column, y_column), mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_row + column, (y * (dy - shift)).to(DX.dtype.element_ty), mask=inside)


def forward_column_split(
    x: Tensor, *, device: Device, splits: int, block: int, num_warps: int, waves_per_eu: int | None = None
) -> tuple[Tensor]:
    """Maxima and sums of the rows in ``splits`` parts, blocks of columns in turn, and the result in a second launch."""
    y, width = allocate_like(x), x.shape[-1]
    (source,), target, row_dims, strides = walk((x,), y)
    rows = x.numel() // width
    parts = x.new_empty((rows, 2, splits), dtype=torch.float32)
    sizes = {"WIDTH": width, "BLOCK": block, "SPLITS": splits, "ROW_DIMS": row_dims}
    options = options_for(num_warps, waves_per_eu)
    launch(_parts, (rows * splits,), source, parts, rows, *strides[:8], **sizes, **options)
    launch(_normalise, (rows * splits,), source, parts, target, rows, *strides, **sizes, **options)
    return (y if target is y else y.copy_(target),)


def backward_column_split(
    dy: Tensor,
    y: Tensor,
    *,
    device: Device,
    needs: tuple[bool],
    splits: int,
    block: int,
    num_warps: int,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None]:
    """Sums of the rows in ``splits`` parts, blocks of columns in turn, and the gradient in a second launch."""
    if not needs[0]:
        return (None,)
    dx, width = allocate_like(y), y.shape[-1]
    sources, target, row_dims, strides = walk((dy, y), dx)
    rows = y.numel() // width
    dots = y.new_empty((rows, splits), dtype=torch.float32)
    sizes = {"WIDTH": width, "BLOCK": block, "SPLITS": splits, "ROW_DIMS": row_dims}
    options = options_for(num_warps, waves_per_eu)
    launch(_dots, (rows * splits,), *sources, dots, rows, *strides[:13], **sizes, **options)
    launch(_differentiate, (rows * splits,), *sources, dots, target, rows, *strides, **sizes, **options)
    return (dx if target is dx else dx.copy_(target),)
