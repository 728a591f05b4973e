"""``rms_norm`` in Triton; formula, roundings and saved tensors are those of ``liger_registry.ops.rms_norm``.

Launch functions take ``(x, weight)`` with x (..., hidden), weight (hidden,) or None, and return ``(y, rstd)``; backward
ones take ``(dy, x, weight, rstd)`` and return ``(dx, dweight)``, None where it is not needed. Statistics, reductions
and the whole backward are in fp32 and rounded once; only llama's forward rounds in between, as its formula does.

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
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None]


@triton.jit
def reciprocal_root(sum_of_squares, eps, HIDDEN: tl.constexpr):
    """1 / sqrt(mean + eps), correctly rounded at each step: once a row, so exactness is free."""
    mean = tl.div_rn(sum_of_squares, tl.cast(HIDDEN, tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + tl.cast(eps, tl.float32)))


@triton.jit
def factor_of(w, offset, LLAMA: tl.constexpr):
    """offset + weight in fp32; llama's formula rounds it in the weight's own dtype."""
    factor = w.to(tl.float32) + tl.cast(offset, tl.float32)
    if LLAMA:
        factor = factor.to(w.dtype).to(tl.float32)
    return factor


@triton.jit
def rounded(normed, dtype: tl.constexpr, LLAMA: tl.constexpr):
    """The normalised row as its weight meets it: llama rounds to the dtype of x first.

    The product of two bf16 or fp16 numbers is exact in fp32, so rounding it once is what PyTorch's product does.
    """
    if LLAMA:
        normed = normed.to(dtype).to(tl.float32)
    return normed


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _forward(
    X,
    W,
    Y,
    RSTD,
    rows,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LATE: tl.constexpr,
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
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x_columns = X + column_offsets(column, x_column)
    if W is not None and not LATE:
        factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = row_ids(tile, rows, BLOCK_ROWS)
        valid = row < tl.cast(rows, row.dtype)
        mask = valid[:, None] & inside[None, :]
        x_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
        x = tl.load(x_columns[None, :] + x_row[:, None], mask=mask, other=0.0).to(tl.float32)
        rstd = reciprocal_root(tl.sum(x * x, 1), eps, HIDDEN)
        tl.store(RSTD + row, rstd, mask=valid)
        y = x * rstd[:, None]
        if W is not None:
            if LATE:
                w = tl.load(W + column, mask=inside, other=0.0, eviction_policy="evict_last")
                factor = factor_of(w, offset, LLAMA)
            y = rounded(y, X.dtype.element_ty, LLAMA) * factor[None, :]
        y_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        tl.store(Y + y_row[:, None] + column[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _backward(
    DY,
    X,
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
        factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
    if PARTIAL is not None:
        total = tl.zeros([BLOCK_ROWS, BLOCK] if TILE_SUMS else [BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
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
            total += dy * normed if TILE_SUMS else tl.sum(dy * normed, 0)
        if DX is not None:
            if W is not None:
                if RELOAD_WEIGHT:
                    # A unit's registers hold 65536 numbers: the sum and the tiles of 16384 columns, but not this too.
                    factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
                dy *= factor[None, :]
            shift = tl.sum(dy * normed, 1)[:, None] / HIDDEN
            dx_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
            dx = (dy - normed * shift) * rstd
            tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    if PARTIAL is not None:
        total = tl.sum(total, 0) if TILE_SUMS else total
        tl.store(PARTIAL + tl.program_id(0).to(tl.int64) * HIDDEN + column, total, mask=inside)


def options_for(device: Device, waves_per_eu: int | None) -> dict[str, Any]:
    """Launch options that only one vendor's compiler knows."""
    return {"waves_per_eu": waves_per_eu} if waves_per_eu is not None and device.vendor == "rocm" else {}


def allocate(x: Tensor, weight: Tensor | None, casting: str) -> tuple[Tensor, Tensor]:
    """Empty ``(y, rstd)``, as the contract's ``allocate`` gives them."""
    dtype = None
    if weight is not None and casting == "llama" and weight.dtype != x.dtype:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    return allocate_like(x, dtype), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def forward_row(
    x: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """One row at a time, all of it in registers; ``programs_per_unit`` as in ``forward_multi_row``."""
    return forward_multi_row(
        x,
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
) -> tuple[Tensor, Tensor]:
    """``block_rows`` rows at a time; with ``programs_per_unit`` of 0 a program a tile, else that many for each unit.

    A program of one tile reads the weight behind the tile's sum: before, it would hold registers and loads back.
    """
    weight = dense_vector(weight)
    y, rstd = allocate(x, weight, casting)
    row_dims, strides = (0, ()) if x.is_contiguous() else strided((x,), (y,))
    if row_dims > MOST_ROW_DIMS:
        dense, rstd = forward_multi_row(
            x.contiguous(),
            weight,
            device=device,
            eps=eps,
            offset=offset,
            casting=casting,
            block_rows=block_rows,
            programs_per_unit=programs_per_unit,
            num_warps=num_warps,
            num_stages=num_stages,
            waves_per_eu=waves_per_eu,
        )
        return y.copy_(dense), rstd
    hidden, rows = x.shape[-1], rstd.shape[0]
    tiles = -(-rows // block_rows)
    launch(
        _forward,
        (min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles,),
        x,
        weight,
        y,
        rstd,
        rows,
        eps,
        offset,
        *strides,
        HIDDEN=hidden,
        BLOCK=1 << (hidden - 1).bit_length(),
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        LATE=not programs_per_unit,
        LLAMA=casting == "llama",
        ROW_DIMS=row_dims,
        num_warps=num_warps,
        **options_for(device, waves_per_eu),
    )
    return y, rstd


def backward_persistent(
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
    programs_per_unit: int,
    block_rows: int,
    num_warps: int,
    num_stages: int,
    reload_weight: bool = False,
    waves_per_eu: int | None = None,
) -> Gradients:
    """Few programs that walk over the rows with loads ahead, each with its sum of the weight's gradient in registers.

    One program a multiprocessor with 3 stages moves 96 % of what the memory can (16384 x 4096 on an H200); a program
    for each slab of rows without loads ahead moves 42 %.
    """
    weight, rstd = dense_vector(weight), dense_vector(rstd)
    dx = allocate_like(x) if needs[0] else None
    needs_weight = needs[1] and weight is not None
    contiguous = x.is_contiguous() and dy.is_contiguous()
    row_dims, strides = (0, ()) if contiguous else strided((dy, x), (dx,))
    if row_dims > MOST_ROW_DIMS:
        dense, dweight = backward_persistent(
            dy.contiguous(),
            x.contiguous(),
            weight,
            rstd,
            device=device,
            needs=needs,
            eps=eps,
            offset=offset,
            casting=casting,
            programs_per_unit=programs_per_unit,
            block_rows=block_rows,
            num_warps=num_warps,
            num_stages=num_stages,
            reload_weight=reload_weight,
            waves_per_eu=waves_per_eu,
        )
        return dx if dx is None or dense is None else dx.copy_(dense), dweight
    hidden, rows = x.shape[-1], rstd.shape[0]
    programs = min(-(-rows // block_rows), most := programs_per_unit * device.units)
    partial = rstd.new_empty((programs, hidden)) if needs_weight else None
    if dx is not None or needs_weight:
        launch(
            _backward,
            (programs,),
            dy,
            x,
            weight,
            rstd,
            dx,
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
    return dx, None if partial is None or weight is None else sum_partials(partial, weight, most)
