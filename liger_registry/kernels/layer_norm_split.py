"""``layer_norm`` in Triton for rows that one program cannot hold, or too few rows to fill the device by themselves.

Several programs share a row. What they have to know of each other goes through a small tensor between two launches: no
atomics and no counters, so results have the same bits every time, on any stream and in graphs.

Forward's first launch leaves each part's mean and sum of squared distances from it. Parts, and blocks within a part,
are merged as Chan, Golub and LeVeque (1979) do: all that is added is positive, so a mean far from zero, or far from one
block to the next, costs no digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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
)
from liger_registry.kernels.layer_norm import allocate, gradients_of, views
from liger_registry.kernels.rms_norm import options_for, reciprocal_root
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit
def _split(SPLITS: tl.constexpr):
    """The row and the part of it that this program works on, neighbours on one row."""
    return (tl.program_id(0) // SPLITS).to(tl.uint32), tl.program_id(0) % SPLITS


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _moments(
    X,
    MOMENTS,
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
    squares = tl.zeros([BLOCK], tl.float32)
    between = tl.zeros([], tl.float32)
    mean = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.float32)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(HIDDEN - first, BLOCK).to(tl.float32)
        own = tl.div_rn(tl.sum(x, 0), count)
        distance = tl.where(inside, x - own, 0.0)
        squares += distance * distance
        step = own - mean
        together = seen + count
        mean += step * (count / together)
        between += step * (step * (seen * count / together))
        seen = together
    at = MOMENTS + (row.to(tl.int64) * SPLITS + part) * 2
    tl.store(at, mean)
    tl.store(at + 1, tl.sum(squares, 0) + between)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _normalise(
    X,
    W,
    B,
    MOMENTS,
    Y,
    MEAN,
    RSTD,
    rows,
    eps,
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
    y0=None,
    y1=None,
    y2=None,
    y3=None,
):
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    row, part = _split(SPLITS)
    x_row = X + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    y_row = Y + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
    parts = tl.arange(0, SPLITS)
    # Every part has its share of whole blocks, but for the columns that the last block lacks.
    lacking = tl.where(parts == (BLOCKS - 1) % SPLITS, BLOCKS * BLOCK - HIDDEN, 0)
    count = (((BLOCKS - 1 - parts) // SPLITS + 1) * BLOCK - lacking).to(tl.float32)
    at = MOMENTS + (row.to(tl.int64) * SPLITS + parts) * 2
    means, squares = tl.load(at), tl.load(at + 1)
    # Relative to one of them, so that means far from zero are averaged without losing digits.
    near = tl.load(MOMENTS + row.to(tl.int64) * SPLITS * 2)
    mean = near + tl.div_rn(tl.sum(count * (means - near), 0), tl.cast(HIDDEN, tl.float32))
    distance = means - mean
    rstd = reciprocal_root(tl.sum(squares + count * distance * distance, 0), eps, HIDDEN)
    tl.store(MEAN + row, mean, mask=part == 0)
    tl.store(RSTD + row, rstd, mask=part == 0)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if W is not None:
            y *= tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
        if B is not None:
            y += tl.load(B + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_row + column, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _dots(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DOTS,
    rows,
    HIDDEN: tl.constexpr,
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
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
):
    row, part = _split(SPLITS)
    x_row = X + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    dy_row = DY + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
    mean, rstd = tl.load(MEAN + row), tl.load(RSTD + row)
    level = tl.zeros([BLOCK], tl.float32)
    shift = tl.zeros([BLOCK], tl.float32)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_row + column_offsets(column, dy_column), mask=inside, other=0.0).to(tl.float32)
        if W is not None:
            dy *= tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
        level += dy
        shift += dy * ((x - mean) * rstd)
    at = DOTS + (row.to(tl.int64) * SPLITS + part) * 2
    tl.store(at, tl.sum(level, 0))
    tl.store(at + 1, tl.sum(shift, 0))


@triton.jit(do_not_specialize=["rows", "groups", "n1", "n2", "n3"])
def _backward_columns(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DOTS,
    DX,
    PARTIAL,
    rows,
    groups,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
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
        weight = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
    if SUM_WEIGHT:
        of_weight = tl.zeros([BLOCK], tl.float32)
    if SUM_BIAS:
        of_bias = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, BLOCK_ROWS), groups, num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        dy_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
        dy = tl.load(dy_columns[None, :] + dy_row[:, None], mask=mask, other=0.0).to(tl.float32)
        if SUM_BIAS:
            of_bias += tl.sum(dy, 0)
        if DX is not None or SUM_WEIGHT:
            x_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
            x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(MEAN + row, mask=valid, other=0.0)[:, None]
            rstd = tl.load(RSTD + row, mask=valid, other=0.0)[:, None]
            normed = (x - mean) * rstd
            if SUM_WEIGHT:
                of_weight += tl.sum(dy * normed, 0)
            if DX is not None:
                if W is not None:
                    dy *= weight[None, :]
                at = DOTS + (row.to(tl.int64)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]) * 2
                level = tl.sum(tl.load(at, mask=valid[:, None], other=0.0), 1)[:, None] / HIDDEN
                shift = tl.sum(tl.load(at + 1, mask=valid[:, None], other=0.0), 1)[:, None] / HIDDEN
                dx = (dy - level - normed * shift) * rstd
                dx_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
                tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    start = group.to(tl.int64) * ((SUM_WEIGHT + SUM_BIAS) * HIDDEN)
    if SUM_WEIGHT:
        tl.store(PARTIAL + start + column, of_weight, mask=inside)
    if SUM_BIAS:
        tl.store(PARTIAL + start + SUM_WEIGHT * HIDDEN + column, of_bias, mask=inside)


def forward_column_split(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    device: Device,
    eps: float,
    splits: int,
    block: int,
    num_warps: int,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``splits`` programs a row, in blocks of ``block`` columns: moments first, then the rows themselves."""
    y, mean, rstd = allocate(x)
    source, target, row_dims = x, y, 0
    strides: tuple[int | None, ...] = ()
    if not x.is_contiguous():
        row_dims, strides = strided((x,), (y,))
        if row_dims > MOST_ROW_DIMS:
            source, row_dims, strides = x.contiguous(), 0, ()
            target = torch.empty_like(source)
    hidden, rows = x.shape[-1], rstd.shape[0]
    moments = rstd.new_empty((rows, splits, 2))
    options = {"num_warps": num_warps, **options_for(device, waves_per_eu)}
    constants = {"HIDDEN": hidden, "BLOCK": block, "SPLITS": splits, "ROW_DIMS": row_dims}
    launch(_moments, (rows * splits,), source, moments, rows, *strides[:8], **constants, **options)
    vectors = dense_vector(weight), dense_vector(bias)
    launch(
        _normalise,
        (rows * splits,),
        source,
        *vectors,
        moments,
        target,
        mean,
        rstd,
        rows,
        eps,
        *strides,
        **constants,
        **options,
    )
    return y if target is y else y.copy_(target), mean, rstd


def backward_column_split(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool, bool],
    eps: float,
    splits: int,
    block: int,
    block_rows: int,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> Gradients:
    """The sums over rows in ``splits`` parts first, then gradients by blocks of columns and groups of rows."""
    weighted, biased = weight if needs[1] else None, bias if needs[2] else None
    dx = allocate_like(x) if needs[0] else None
    (row_dims, strides), dy, x, target = views(dy, x, dx)
    weight, mean, rstd = dense_vector(weight), dense_vector(mean), dense_vector(rstd)
    hidden, rows = x.shape[-1], rstd.shape[0]
    options = {"num_warps": num_warps, **options_for(device, waves_per_eu)}
    constants = {"HIDDEN": hidden, "BLOCK": block, "SPLITS": splits, "ROW_DIMS": row_dims}
    dots = None
    if dx is not None:
        dots = rstd.new_empty((rows, splits, 2))
        tensors = dy, x, weight, mean, rstd, dots
        launch(_dots, (rows * splits,), *tensors, rows, *strides[:13], **constants, **options)
    column_blocks = -(-hidden // block)
    most = -(-programs_per_unit * device.units // column_blocks)
    groups = min(-(-rows // block_rows), most)
    sums = (weighted is not None) + (biased is not None)
    partial = rstd.new_empty((groups, sums, hidden)) if sums else None
    if dx is not None or sums:
        launch(
            _backward_columns,
            (groups * column_blocks,),
            dy,
            x,
            weight,
            mean,
            rstd,
            dots,
            target,
            partial,
            rows,
            groups,
            *strides,
            **constants,
            BLOCK_ROWS=block_rows,
            STAGES=num_stages,
            SUM_WEIGHT=weighted is not None,
            SUM_BIAS=biased is not None,
            **options,
        )
    if dx is not None and target is not None and target is not dx:
        dx.copy_(target)
    return (dx, *gradients_of(partial, weighted, biased, most))
