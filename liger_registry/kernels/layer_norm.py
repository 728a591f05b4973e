"""``layer_norm`` in Triton; formula, roundings and saved tensors are those of ``liger_registry.ops.layer_norm``.

Launch functions take ``(x, weight, bias)`` with x (..., hidden), weight and bias (hidden,) or None, and return
``(y, mean, rstd)``; backward ones take ``(dy, x, weight, bias, mean, rstd)`` and return ``(dx, dweight, dbias)``, None
where it is not needed. All of it is in fp32 and rounded once. The variance is the mean of squared distances from a mean
that is known already, so a mean far from zero costs no digits.

x and dy are read through their strides. Only with more than four leading dimensions that do not coalesce over all
tensors of a launch (six-dimensional permuted views) is a contiguous copy made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    sum_partials,
    sums_by_tile,
)
from liger_registry.kernels.rms_norm import options_for, reciprocal_root
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _forward(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    rows,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LATE: tl.constexpr,
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
    inside = column < HIDDEN
    x_columns = X + column_offsets(column, x_column)
    if W is not None and not LATE:
        weight = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
    if B is not None and not LATE:
        bias = tl.load(B + column, mask=inside, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        x_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
        x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(x, 1), tl.cast(HIDDEN, tl.float32))
        distance = x - mean[:, None]
        if HIDDEN != BLOCK:
            distance = tl.where(inside[None, :], distance, 0.0)
        rstd = reciprocal_root(tl.sum(distance * distance, 1), eps, HIDDEN)
        tl.store(MEAN + row, mean, mask=valid)
        tl.store(RSTD + row, rstd, mask=valid)
        y = distance * rstd[:, None]
        if W is not None:
            if LATE:
                weight = tl.load(W + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y *= weight[None, :]
        if B is not None:
            if LATE:
                bias = tl.load(B + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y += bias[None, :]
        y_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        tl.store(Y + y_row[:, None] + column[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _backward(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    PARTIAL,
    rows,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD_WEIGHT: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    TILE_SUMS: tl.constexpr,
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
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dy_columns = DY + column_offsets(column, dy_column)
    x_columns = X + column_offsets(column, x_column)
    if DX is not None and W is not None and not RELOAD_WEIGHT:
        weight = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
    if SUM_WEIGHT:
        of_weight = tl.zeros([BLOCK_ROWS, BLOCK] if TILE_SUMS else [BLOCK], tl.float32)
    if SUM_BIAS:
        of_bias = tl.zeros([BLOCK_ROWS, BLOCK] if TILE_SUMS else [BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        dy_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
        # Zero outside of the rows and columns, and with it all that is summed below.
        dy = tl.load(dy_columns[None, :] + dy_row[:, None], mask=mask, other=0.0).to(tl.float32)
        if SUM_BIAS:
            of_bias += dy if TILE_SUMS else tl.sum(dy, 0)
        if DX is not None or SUM_WEIGHT:
            x_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
            x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(MEAN + row, mask=valid, other=0.0)[:, None]
            rstd = tl.load(RSTD + row, mask=valid, other=0.0)[:, None]
            normed = (x - mean) * rstd
            if SUM_WEIGHT:
                of_weight += dy * normed if TILE_SUMS else tl.sum(dy * normed, 0)
            if DX is not None:
                if W is not None:
                    if RELOAD_WEIGHT:
                        # A unit's registers hold 65536 numbers: both sums and the tiles, but not this too.
                        weight = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
                    dy *= weight[None, :]
                level = tl.sum(dy, 1)[:, None] / HIDDEN
                shift = tl.sum(dy * normed, 1)[:, None] / HIDDEN
                dx = (dy - level - normed * shift) * rstd
                dx_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
                tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    first = tl.program_id(0).to(tl.int64) * ((SUM_WEIGHT + SUM_BIAS) * HIDDEN)
    if SUM_WEIGHT:
        of_weight = tl.sum(of_weight, 0) if TILE_SUMS else of_weight
        tl.store(PARTIAL + first + column, of_weight, mask=inside)
    if SUM_BIAS:
        of_bias = tl.sum(of_bias, 0) if TILE_SUMS else of_bias
        tl.store(PARTIAL + first + SUM_WEIGHT * HIDDEN + column, of_bias, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _sum_pairs(P, WEIGHT, BIAS, count, HIDDEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    second = tl.program_id(0) % 2
    column = (tl.program_id(0) // 2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, count, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        mask = (part < count)[:, None] & inside[None, :]
        start = P + second * HIDDEN + part.to(tl.int64)[:, None] * (2 * HIDDEN)
        total += tl.load(start + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if second == 0:
        tl.store(WEIGHT + column, result.to(WEIGHT.dtype.element_ty), mask=inside)
    else:
        tl.store(BIAS + column, result.to(BIAS.dtype.element_ty), mask=inside)


def gradients_of(
    partial: Tensor | None, weight: Tensor | None, bias: Tensor | None, most: int
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias from partial sums, in one launch and an order that never changes.

    Args:
        partial: (count, sums, hidden), fp32, with a sum for each of the two that is not None.
        weight: (hidden,), whose dtype its gradient takes; None if none is needed.
        bias: the same.
        most: what ``count`` is where there are rows enough; it fixes the code, so that a new length compiles nothing.
    """
    if partial is None:
        return None, None
    count, _, hidden = partial.shape
    if weight is None or bias is None:
        sums = partial.view(count, hidden)
        return (
            None if weight is None else sum_partials(sums, weight, most),
            None if bias is None else sum_partials(sums, bias, most),
        )
    of_weight, of_bias = weight.new_empty(hidden), bias.new_empty(hidden)
    # Sizes as in `sum_partials`: 8 columns of fp32 are one sector, and more of them only where enough programs remain.
    columns = 32 if hidden >= 1024 else 8
    launch(
        _sum_pairs,
        (2 * -(-hidden // columns),),
        partial,
        of_weight,
        of_bias,
        count,
        HIDDEN=hidden,
        BLOCK_COLUMNS=columns,
        BLOCK_PARTS=min(1 << (most - 1).bit_length(), 16384 // columns),
        num_warps=8,
    )
    return of_weight, of_bias


def allocate(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty ``(y, mean, rstd)``, as the contract's ``allocate`` gives them."""
    rows = x.numel() // x.shape[-1]
    return allocate_like(x), x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def forward_row(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    device: Device,
    eps: float,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One row at a time, all of it in registers; ``programs_per_unit`` as in ``forward_multi_row``."""
    return forward_multi_row(
        x,
        weight,
        bias,
        device=device,
        eps=eps,
        block_rows=1,
        programs_per_unit=programs_per_unit,
        num_warps=num_warps,
        num_stages=num_stages,
        waves_per_eu=waves_per_eu,
    )


def forward_multi_row(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    device: Device,
    eps: float,
    block_rows: int,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``block_rows`` rows at a time; with ``programs_per_unit`` of 0 a program a tile, else that many for each unit.

    A program of one tile reads weight and bias behind the tile's sums: before, they would hold registers and loads.
    """
    y, mean, rstd = allocate(x)
    source, target, row_dims = x, y, 0
    strides: tuple[int | None, ...] = ()
    if not x.is_contiguous():
        row_dims, strides = strided((x,), (y,))
        if row_dims > MOST_ROW_DIMS:
            source, row_dims, strides = x.contiguous(), 0, ()
            target = torch.empty_like(source)
    hidden, rows = x.shape[-1], rstd.shape[0]
    tiles = -(-rows // block_rows)
    launch(
        _forward,
        (min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles,),
        source,
        dense_vector(weight),
        dense_vector(bias),
        target,
        mean,
        rstd,
        rows,
        eps,
        *strides,
        HIDDEN=hidden,
        BLOCK=1 << (hidden - 1).bit_length(),
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        LATE=not programs_per_unit,
        ROW_DIMS=row_dims,
        num_warps=num_warps,
        **options_for(device, waves_per_eu),
    )
    return y if target is y else y.copy_(target), mean, rstd


def backward_persistent(
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
    programs_per_unit: int,
    block_rows: int,
    num_warps: int,
    num_stages: int,
    reload_weight: bool = False,
    waves_per_eu: int | None = None,
) -> Gradients:
    """Few programs that walk over the rows with loads ahead, each with the sums of both vectors in registers."""
    weighted, biased = weight if needs[1] else None, bias if needs[2] else None
    dx = allocate_like(x) if needs[0] else None
    call, dy, x, target = views(dy, x, dx)
    hidden, rows = x.shape[-1], rstd.shape[0]
    programs = min(-(-rows // block_rows), most := programs_per_unit * device.units)
    sums = (weighted is not None) + (biased is not None)
    partial = mean.new_empty((programs, sums, hidden)) if sums else None
    if dx is not None or sums:
        launch(
            _backward,
            (programs,),
            dy,
            x,
            dense_vector(weight),
            dense_vector(mean),
            dense_vector(rstd),
            target,
            partial,
            rows,
            *call[1],
            HIDDEN=hidden,
            BLOCK=1 << (hidden - 1).bit_length(),
            BLOCK_ROWS=block_rows,
            STAGES=num_stages,
            RELOAD_WEIGHT=reload_weight,
            SUM_WEIGHT=weighted is not None,
            SUM_BIAS=biased is not None,
            TILE_SUMS=sums_by_tile(hidden, block_rows, num_warps, device),
            ROW_DIMS=call[0],
            num_warps=num_warps,
            **options_for(device, waves_per_eu),
        )
    if dx is not None and target is not None and target is not dx:
        dx.copy_(target)
    return (dx, *gradients_of(partial, weighted, biased, most))


def views(dy: Tensor, x: Tensor, dx: Tensor | None) -> tuple[tuple[int, Any], Tensor, Tensor, Tensor | None]:
    """How to walk over the rows: ``(ROW_DIMS, strides)``, dy, x and what to write to, copies where nothing else helps.

    What comes back for dx is another tensor than dx where dx has to be copied from it.
    """
    if x.is_contiguous() and dy.is_contiguous():
        return (0, ()), dy, x, dx
    row_dims, strides = strided((dy, x), (dx,))
    if row_dims <= MOST_ROW_DIMS:
        return (row_dims, strides), dy, x, dx
    dense = x.contiguous()
    return (0, ()), dy.contiguous(), dense, None if dx is None else torch.empty_like(dense)
