"""``fused_add_rms_norm`` in Triton; formula, roundings and saved tensors are those of
``liger_registry.ops.fused_add_rms_norm``.

Launch functions take ``(x, residual, weight)`` with x and residual (..., hidden), weight (hidden,) or None, and return
``(y, new_residual, rstd)``; backward ones take ``(dy, dnew_residual, weight, new_residual, rstd)`` and return
``(dx, dresidual, dweight)``, None where it is not needed; dx and dresidual are one tensor. Statistics, reductions and
the whole backward are in fp32 and rounded once; forward rounds the sum, and llama's once more before the weight.

Tensors are read through their strides. Only with more than four leading dimensions that do not coalesce over all
tensors of a launch (six-dimensional permuted views) are contiguous copies made.
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
from liger_registry.kernels.rms_norm import allocate, factor_of, options_for, reciprocal_root, rounded
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _forward(
    X,
    RESIDUAL,
    W,
    Y,
    TOTAL,
    RSTD,
    rows,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
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
    r_column=None,
    r0=None,
    r1=None,
    r2=None,
    r3=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
    t0=None,
    t1=None,
    t2=None,
    t3=None,
):
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x_columns = X + column_offsets(column, x_column)
    r_columns = RESIDUAL + column_offsets(column, r_column)
    if W is not None:
        factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        x_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
        r_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, r0, r1, r2, r3)
        x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=0.0).to(tl.float32)
        residual = tl.load(r_columns[None, :] + r_row[:, None], mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(TOTAL.dtype.element_ty)
        t_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, t0, t1, t2, t3)
        tl.store(TOTAL + t_row[:, None] + column[None, :], total, mask=mask)
        total = total.to(tl.float32)
        rstd = reciprocal_root(tl.sum(total * total, 1), eps, HIDDEN)
        tl.store(RSTD + row, rstd, mask=valid)
        y = total * rstd[:, None]
        if W is not None:
            y = rounded(y, TOTAL.dtype.element_ty, LLAMA) * factor[None, :]
        y_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        tl.store(Y + y_row[:, None] + column[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _backward(
    DY,
    TOTAL,
    DTOTAL,
    W,
    RSTD,
    DX,
    PARTIAL,
    rows,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD_WEIGHT: tl.constexpr,
    TILE_SUMS: tl.constexpr,
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
    t_column=None,
    t0=None,
    t1=None,
    t2=None,
    t3=None,
    dt_column=None,
    dt0=None,
    dt1=None,
    dt2=None,
    dt3=None,
    dx0=None,
    dx1=None,
    dx2=None,
    dx3=None,
):
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dy_columns = DY + column_offsets(column, dy_column)
    t_columns = TOTAL + column_offsets(column, t_column)
    dt_columns = DTOTAL + column_offsets(column, dt_column)
    if DX is not None and W is not None and not RELOAD_WEIGHT:
        factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
    if PARTIAL is not None:
        of_weight = tl.zeros([BLOCK_ROWS, BLOCK] if TILE_SUMS else [BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        t_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, t0, t1, t2, t3)
        dy_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
        total = tl.load(t_columns[None, :] + t_row[:, None], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_columns[None, :] + dy_row[:, None], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=valid, other=0.0)[:, None]
        normed = total * rstd
        if PARTIAL is not None:
            of_weight += dy * normed if TILE_SUMS else tl.sum(dy * normed, 0)
        if DX is not None:
            dt_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dt0, dt1, dt2, dt3)
            straight = tl.load(dt_columns[None, :] + dt_row[:, None], mask=mask, other=0.0)
            if W is not None:
                if RELOAD_WEIGHT:
                    # A unit's registers hold 65536 numbers: the sum and the tiles, but not this too.
                    factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
                dy *= factor[None, :]
            shift = tl.sum(dy * normed, 1)[:, None] / HIDDEN
            dx = (dy - normed * shift) * rstd + straight.to(tl.float32)
            dx_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
            tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    if PARTIAL is not None:
        of_weight = tl.sum(of_weight, 0) if TILE_SUMS else of_weight
        tl.store(PARTIAL + tl.program_id(0).to(tl.int64) * HIDDEN + column, of_weight, mask=inside)


def walk(
    reads: tuple[Tensor, ...], writes: tuple[Tensor | None, ...]
) -> tuple[int, tuple[Any, ...], tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """How to walk over the rows of tensors of one shape: ``ROW_DIMS``, strides, what to read and what to write.

    Where no kernel can walk over them, the tensors that come back are contiguous, and ``finish`` copies the results.
    """
    if all(t.is_contiguous() for t in reads):
        return 0, (), reads, writes
    row_dims, strides = strided(reads, writes)
    if row_dims <= MOST_ROW_DIMS:
        return row_dims, strides, reads, writes
    dense = tuple(None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in writes)
    return 0, (), tuple(t.contiguous() for t in reads), dense


def finish(results: tuple[Tensor | None, ...], written: tuple[Tensor | None, ...]) -> None:
    """Copy what was written elsewhere into the results."""
    for result, found in zip(results, written, strict=True):
        if result is not None and found is not None and found is not result:
            result.copy_(found)


def forward_row(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    device: Device,
    eps: float,
    offset: float,
    casting: str,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One row at a time, all of it in registers; ``programs_per_unit`` as in ``forward_multi_row``."""
    return forward_multi_row(
        x,
        residual,
        weight,
        device=device,
        eps=eps,
        offset=offset,
        casting=casting,
        block_rows=1,
        programs_per_unit=programs_per_unit,
        num_warps=num_warps,
        num_stages=num_stages,
        waves_per_eu=waves_per_eu,
    )


def forward_multi_row(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    device: Device,
    eps: float,
    offset: float,
    casting: str,
    block_rows: int,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``block_rows`` rows at a time; with ``programs_per_unit`` of 0 a program a tile, else that many for each unit."""
    y, rstd = allocate(x, weight, casting)
    total = allocate_like(x)
    row_dims, strides, reads, writes = walk((x, residual), (y, total))
    hidden, rows = x.shape[-1], rstd.shape[0]
    tiles = -(-rows // block_rows)
    launch(
        _forward,
        (min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles,),
        *reads,
        dense_vector(weight),
        *writes,
        rstd,
        rows,
        eps,
        offset,
        *strides,
        HIDDEN=hidden,
        BLOCK=1 << (hidden - 1).bit_length(),
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        LLAMA=casting == "llama",
        ROW_DIMS=row_dims,
        num_warps=num_warps,
        **options_for(device, waves_per_eu),
    )
    finish((y, total), writes)
    return y, total, rstd


def backward_persistent(
    dy: Tensor,
    dnew_residual: Tensor,
    weight: Tensor | None,
    new_residual: Tensor,
    rstd: Tensor,
    *,
    device: Device,
    needs: tuple[bool, bool, bool],
    eps: float,
    offset: float,
    casting: str,
    programs_per_unit: int,
    block_rows: int,
    num_warps: int,
    num_stages: int,
    reload_weight: bool = False,
    waves_per_eu: int | None = None,
) -> Gradients:
    """Few programs that walk over the rows with loads ahead, each with the weight's sum in registers."""
    weighted = weight if needs[2] else None
    dx = allocate_like(new_residual) if needs[0] or needs[1] else None
    row_dims, strides, reads, writes = walk((dy, new_residual, dnew_residual), (dx,))
    hidden, rows = new_residual.shape[-1], rstd.shape[0]
    programs = min(-(-rows // block_rows), most := programs_per_unit * device.units)
    partial = None if weighted is None else rstd.new_empty((programs, hidden))
    if dx is not None or partial is not None:
        launch(
            _backward,
            (programs,),
            *reads,
            dense_vector(weight),
            dense_vector(rstd),
            *writes,
            partial,
            rows,
            offset,
            *strides,
            HIDDEN=hidden,
            BLOCK=1 << (hidden - 1).bit_length(),
            BLOCK_ROWS=block_rows,
            STAGES=num_stages,
            RELOAD_WEIGHT=reload_weight,
            TILE_SUMS=sums_by_tile(hidden, block_rows, num_warps, device),
            LLAMA=casting == "llama",
            ROW_DIMS=row_dims,
            num_warps=num_warps,
            **options_for(device, waves_per_eu),
        )
    finish((dx,), writes)
    return gradients_of(dx, partial, weighted, needs, most)


def gradients_of(
    dx: Tensor | None, partial: Tensor | None, weight: Tensor | None, needs: tuple[bool, bool, bool], most: int
) -> Gradients:
    """The gradients: one tensor for x and residual, and the sum of the weight's partial sums."""
    dweight = None if partial is None or weight is None else sum_partials(partial, weight, most)
    return dx if needs[0] else None, dx if needs[1] else None, dweight
