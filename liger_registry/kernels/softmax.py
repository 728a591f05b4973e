"""``softmax`` in Triton; formula and roundings are those of ``liger_registry.ops.softmax``.

Launch functions take ``x`` (..., width) and return ``(y,)``; backward ones take ``(dy, y)`` and return ``(dx,)``, None
where it is not needed. All of it is in fp32 and rounded once. Tensors are read through their strides; only with more
than four leading dimensions that do not coalesce over all tensors of a launch are contiguous copies made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import (
    MOST_ROW_DIMS,
    Strides,
    allocate_like,
    column_offsets,
    row_ids,
    row_offsets,
    strided,
)
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit
def anchored(maximum):
    """What exponents count from: the row's maximum, and 0 where all of it is -inf, so that no -inf meets another."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def reciprocal(total):
    """1 / total, correctly rounded; NaN of a row that sums to 0, as torch gives where all of it is -inf."""
    empty = total == 0.0
    return tl.where(empty, float("nan"), tl.div_rn(1.0, tl.where(empty, 1.0, total)))


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _forward(
    X,
    Y,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
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
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x_columns = X + column_offsets(column, x_column)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        mask = (row < tl.cast(rows, row.dtype))[:, None] & inside[None, :]
        x_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
        x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=-float("inf")).to(tl.float32)
        terms = tl.exp(x - anchored(tl.max(x, 1))[:, None])
        y = terms * reciprocal(tl.sum(terms, 1))[:, None]
        y_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        tl.store(Y + y_row[:, None] + column[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _forward_online(
    X,
    Y,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
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
    row = tl.program_id(0).to(tl.uint32)
    x_row = X + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    y_row = Y + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    anchor, total = maximum_and_sum(x_row, 0, BLOCK, WIDTH, BLOCK, STAGES, x_column)
    scale = reciprocal(total)
    # Backwards: the end of a wide row is what the cache still holds.
    for step in tl.range(0, (WIDTH + BLOCK - 1) // BLOCK, num_stages=STAGES):
        column = ((WIDTH + BLOCK - 1) // BLOCK - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(y_row + column, (tl.exp(x - anchor) * scale).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def maximum_and_sum(x_row, start, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, x_column):
    """What exponents count from, and their sum, of a row's blocks that begin at ``start`` and lie ``step`` apart.

    The sum is kept apart for each column of a block; whenever the maximum grows, what was summed shrinks with it.
    """
    maximum = tl.cast(-float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, WIDTH, step, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x, 0))
        anchor = anchored(larger)
        total = total * tl.exp(maximum - anchor) + tl.exp(x - anchor)
        maximum = larger
    return anchored(maximum), tl.sum(total, 0)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _backward(
    DY,
    Y,
    DX,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
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
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dy_columns = DY + column_offsets(column, dy_column)
    y_columns = Y + column_offsets(column, y_column)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        mask = (row < tl.cast(rows, row.dtype))[:, None] & inside[None, :]
        dy_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
        y_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        dy = tl.load(dy_columns[None, :] + dy_row[:, None], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_columns[None, :] + y_row[:, None], mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(dy * y, 1)[:, None])
        dx_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
        tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _backward_two_pass(
    DY,
    Y,
    DX,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
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
    row = tl.program_id(0).to(tl.uint32)
    dy_row = DY + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
    y_row = Y + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    dx_row = DX + row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
    shift = dot(dy_row, y_row, 0, BLOCK, WIDTH, BLOCK, STAGES, dy_column, y_column)
    for step in tl.range(0, (WIDTH + BLOCK - 1) // BLOCK, num_stages=STAGES):
        column = ((WIDTH + BLOCK - 1) // BLOCK - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        dy = tl.load(dy_row + column_offsets(column, dy_column), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_row + column_offsets(column, y_column), mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_row + column, (y * (dy - shift)).to(DX.dtype.element_ty), mask=inside)


@triton.jit
def dot(
    dy_row, y_row, start, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, dy_column, y_column
):
    """The sum of ``dy * y`` over a row's blocks that begin at ``start`` and lie ``step`` apart."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, WIDTH, step, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        dy = tl.load(dy_row + column_offsets(column, dy_column), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_row + column_offsets(column, y_column), mask=inside, other=0.0).to(tl.float32)
        total += dy * y
    return tl.sum(total, 0)


def walk(reads: tuple[Tensor, ...], write: Tensor) -> tuple[tuple[Tensor, ...], Tensor, int, Strides]:
    """What a kernel reads and writes for tensors of one shape, its ``ROW_DIMS`` and strides.

    Where no kernel can walk over the rows these are contiguous copies, and what it writes is to be copied to ``write``.
    """
    if all(t.is_contiguous() for t in (*reads, write)):
        return reads, write, 0, ()
    row_dims, strides = strided(reads, (write,))
    if row_dims <= MOST_ROW_DIMS:
        return reads, write, row_dims, strides
    dense = torch.empty_like(write, memory_format=torch.contiguous_format)
    return tuple(t.contiguous() for t in reads), dense, 0, ()


def options_for(num_warps: int, waves_per_eu: int | None) -> dict[str, Any]:
    """Launch options; ``waves_per_eu`` is None where the compiler does not know it."""
    return {"num_warps": num_warps} if waves_per_eu is None else {"num_warps": num_warps, "waves_per_eu": waves_per_eu}


def _grid(rows: int, block_rows: int, programs_per_unit: int, device: Device) -> tuple[int]:
    tiles = -(-rows // block_rows)
    return (min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles,)


def forward_multi_row(
    x: Tensor,
    *,
    device: Device,
    block_rows: int,
    num_warps: int,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor]:
    """``block_rows`` rows at a time, all of them in registers; a program a tile, or so many for each unit that loop."""
    y, width = allocate_like(x), x.shape[-1]
    (source,), target, row_dims, strides = walk((x,), y)
    rows = x.numel() // width
    launch(
        _forward,
        _grid(rows, block_rows, programs_per_unit, device),
        source,
        target,
        rows,
        *strides,
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        ROW_DIMS=row_dims,
        **options_for(num_warps, waves_per_eu),
    )
    return (y if target is y else y.copy_(target),)


def forward_online(
    x: Tensor, *, device: Device, block: int, num_warps: int, num_stages: int = 1, waves_per_eu: int | None = None
) -> tuple[Tensor]:
    """A program a row, in blocks: maximum and sum in one pass, the result in a second one."""
    y, width = allocate_like(x), x.shape[-1]
    (source,), target, row_dims, strides = walk((x,), y)
    rows = x.numel() // width
    launch(
        _forward_online,
        (rows,),
        source,
        target,
        rows,
        *strides,
        WIDTH=width,
        BLOCK=block,
        STAGES=num_stages,
        ROW_DIMS=row_dims,
        **options_for(num_warps, waves_per_eu),
    )
    return (y if target is y else y.copy_(target),)


def backward_multi_row(
    dy: Tensor,
    y: Tensor,
    *,
    device: Device,
    needs: tuple[bool],
    block_rows: int,
    num_warps: int,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None]:
    """``block_rows`` rows at a time; ``programs_per_unit`` as in ``forward_multi_row``."""
    if not needs[0]:
        return (None,)
    dx, width = allocate_like(y), y.shape[-1]
    sources, target, row_dims, strides = walk((dy, y), dx)
    rows = y.numel() // width
    launch(
        _backward,
        _grid(rows, block_rows, programs_per_unit, device),
        *sources,
        target,
        rows,
        *strides,
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        ROW_DIMS=row_dims,
        **options_for(num_warps, waves_per_eu),
    )
    return (dx if target is dx else dx.copy_(target),)


def backward_two_pass(
    dy: Tensor,
    y: Tensor,
    *,
    device: Device,
    needs: tuple[bool],
    block: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None]:
    """A program a row, in blocks: the sum in one pass, the result in a second one."""
    if not needs[0]:
        return (None,)
    dx, width = allocate_like(y), y.shape[-1]
    sources, target, row_dims, strides = walk((dy, y), dx)
    rows = y.numel() // width
    launch(
        _backward_two_pass,
        (rows,),
        *sources,
        target,
        rows,
        *strides,
        WIDTH=width,
        BLOCK=block,
        STAGES=num_stages,
        ROW_DIMS=row_dims,
        **options_for(num_warps, waves_per_eu),
    )
    return (dx if target is dx else dx.copy_(target),)
