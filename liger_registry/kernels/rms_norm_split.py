"""``rms_norm`` in Triton for rows that one program cannot hold, or too few rows to fill the device by themselves.

Several programs share a row. What they have to know of each other, a sum over the row, goes through a small tensor
between two launches: no atomics and no counters, so results have the same bits every time, on any stream and in graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import (
    MOST_ROW_DIMS,
    allocate_like,
    column_offsets,
    dense_vector,
    row_ids,
    row_offsets,
    strided,
    sum_partials,
)
from liger_registry.kernels.rms_norm import allocate, factor_of, options_for, reciprocal_root, rounded
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None]


@triton.jit
def _split(SPLITS: tl.constexpr):
    """The row and the part of it that this program works on, neighbours on one row."""
    return (tl.program_id(0) // SPLITS).to(tl.uint32), tl.program_id(0) % SPLITS


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _sums_of_squares(
    X,
    SUMS,
    rows,
    HIDDEN: tl.constexpr,
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
    x_row = X + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(x_row + column_offsets(column, x_column), mask=column < HIDDEN, other=0.0).to(tl.float32)
        total += x * x
    tl.store(SUMS + row.to(tl.int64) * SPLITS + part, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _normalise(
    X,
    W,
    SUMS,
    Y,
    RSTD,
    rows,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LLAMA: tl.constexpr,
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
    x_row = X + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    y_row = Y + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    sums = tl.load(SUMS + row.to(tl.int64) * SPLITS + tl.arange(0, SPLITS))
    rstd = reciprocal_root(tl.sum(sums, 0), eps, HIDDEN)
    tl.store(RSTD + row, rstd, mask=part == 0)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=0.0).to(tl.float32)
        y = x * rstd
        if W is not None:
            factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
            y = rounded(y, X.dtype.element_ty, LLAMA) * factor
        tl.store(y_row + column, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _dots(
    DY,
    X,
    W,
    RSTD,
    DOTS,
    rows,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LLAMA: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    dy_column=None,
    dy0=None,
    dy1=None,
    dy2=None,
    dy3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
):
    row, part = _split(SPLITS)
    x_row = X + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    dy_row = DY + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
    rstd = tl.load(RSTD + row)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_row + column_offsets(column, dy_column), mask=inside, other=0.0).to(tl.float32)
        if W is not None:
            dy *= factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
        total += dy * (x * rstd)
    tl.store(DOTS + row.to(tl.int64) * SPLITS + part, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows", "groups", "n1", "n2", "n3"])
def _backward_columns(
    DY,
    X,
    W,
    RSTD,
    DOTS,
    DX,
    PARTIAL,
    rows,
    groups,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    LLAMA: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    dy_column=None,
    dy0=None,
    dy1=None,
    dy2=None,
    dy3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
    dx0=None,
    dx1=None,
    dx2=None,
    dx3=None,
):
    COLUMN_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    group = tl.program_id(0) // COLUMN_BLOCKS
    column = (tl.program_id(0) % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dy_columns = DY + column_offsets(column, dy_column)
    x_columns = X + column_offsets(column, x_column)
    if DX is not None and W is not None:
        factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
    if PARTIAL is not None:
        total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, BLOCK_ROWS), groups, num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        x_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
        dy_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
        x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_columns[None, :] + dy_row[:, None], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=valid, other=0.0)[:, None]
        normed = x * rstd
        if PARTIAL is not None:
            total += tl.sum(dy * normed, 0)
        if DX is not None:
            if W is not None:
                dy *= factor[None, :]
            dots = DOTS + row.to(tl.int64)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
            shift = tl.sum(tl.load(dots, mask=valid[:, None], other=0.0), 1)[:, None] / HIDDEN
            dx_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
            dx = (dy - normed * shift) * rstd
            tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    if PARTIAL is not None:
        tl.store(PARTIAL + group.to(tl.int64) * HIDDEN + column, total, mask=inside)


def forward_column_split(
    x: Tensor,
    weight: Tensor | None,
    *,
    device: Device,
    eps: float,
    offset: float,
    casting: str,
    splits: int,
    block: int,
    num_warps: int,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``splits`` programs a row, in blocks of ``block`` columns: sums of squares first, then the rows themselves."""
    weight = dense_vector(weight)
    y, rstd = allocate(x, weight, casting)
    row_dims, strides = (0, ()) if x.is_contiguous() else strided((x,), (y,))
    if row_dims > MOST_ROW_DIMS:
        dense, rstd = forward_column_split(
            x.contiguous(),
            weight,
            device=device,
            eps=eps,
            offset=offset,
            casting=casting,
            splits=splits,
            block=block,
            num_warps=num_warps,
            waves_per_eu=waves_per_eu,
        )
        return y.copy_(dense), rstd
    hidden, rows = x.shape[-1], rstd.shape[0]
    sums = rstd.new_empty((rows, splits))
    options = options_for(device, waves_per_eu)
    launch(
        _sums_of_squares,
        (rows * splits,),
        x,
        sums,
        rows,
        *strides[:8],
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=splits,
        ROW_DIMS=row_dims,
        num_warps=num_warps,
        **options,
    )
    launch(
        _normalise,
        (rows * splits,),
        x,
        weight,
        sums,
        y,
        rstd,
        rows,
        eps,
        offset,
        *strides,
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=splits,
        LLAMA=casting == "llama",
        ROW_DIMS=row_dims,
        num_warps=num_warps,
        **options,
    )
    return y, rstd


def backward_column_split(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool],
    eps: float,
    offset: float,
    casting: str,
    splits: int,
    block: int,
    block_rows: int,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> Gradients:
    """The dots of the rows in ``splits`` parts first, then gradients by blocks of columns and groups of rows."""
    weight, rstd = dense_vector(weight), dense_vector(rstd)
    dx = allocate_like(x) if needs[0] else None
    needs_weight = needs[1] and weight is not None
    contiguous = x.is_contiguous() and dy.is_contiguous()
    row_dims, strides = (0, ()) if contiguous else strided((dy, x), (dx,))
    if row_dims > MOST_ROW_DIMS:
        dense, dweight = backward_column_split(
            dy.contiguous(),
            x.contiguous(),
            weight,
            rstd,
            device=device,
            needs=needs,
            eps=eps,
            offset=offset,
            casting=casting,
            splits=splits,
            block=block,
            block_rows=block_rows,
            programs_per_unit=programs_per_unit,
            num_warps=num_warps,
            num_stages=num_stages,
            waves_per_eu=waves_per_eu,
        )
        return dx if dx is None or dense is None else dx.copy_(dense), dweight
    hidden, rows = x.shape[-1], rstd.shape[0]
    options = options_for(device, waves_per_eu)
    dots = None
    if dx is not None:
        dots = rstd.new_empty((rows, splits))
        launch(
            _dots,
            (rows * splits,),
            dy,
            x,
            weight,
            rstd,
            dots,
            rows,
            offset,
            *strides[:13],
            HIDDEN=hidden,
            BLOCK=block,
            SPLITS=splits,
            LLAMA=casting == "llama",
            ROW_DIMS=row_dims,
            num_warps=num_warps,
            **options,
        )
    column_blocks = -(-hidden // block)
    most = -(-programs_per_unit * device.units // column_blocks)
    groups = min(-(-rows // block_rows), most)
    partial = rstd.new_empty((groups, hidden)) if needs_weight else None
    if dx is not None or needs_weight:
        launch(
            _backward_columns,
            (groups * column_blocks,),
            dy,
            x,
            weight,
            rstd,
            dots,
            dx,
            partial,
            rows,
            groups,
            offset,
            *strides,
            HIDDEN=hidden,
            BLOCK=block,
            BLOCK_ROWS=block_rows,
            SPLITS=splits,
            STAGES=num_stages,
            LLAMA=casting == "llama",
            ROW_DIMS=row_dims,
            num_warps=num_warps,
            **options,
        )
    return dx, None if partial is None or weight is None else sum_partials(partial, weight, most)
