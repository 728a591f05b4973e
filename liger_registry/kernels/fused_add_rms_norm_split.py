"""``fused_add_rms_norm`` in Triton for rows that one program cannot hold, or too few rows to fill the device.

Several programs share a row. Forward's first launch adds and leaves sums of squares, and its second is that of
``rms_norm`` on the sum. Backward's first launch is ``rms_norm``'s, too: only its second has to add what came straight
through the residual stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import (
    allocate_like,
    column_offsets,
    dense_vector,
    row_ids,
    row_offsets,
)
from liger_registry.kernels.fused_add_rms_norm import finish, gradients_of, walk
from liger_registry.kernels.rms_norm import allocate, factor_of, options_for
from liger_registry.kernels.rms_norm_split import _dots, _normalise, _split
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _add(
    X,
    RESIDUAL,
    TOTAL,
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
    r_column=None,
    r0=None,
    r1=None,
    r2=None,
    r3=None,
    t0=None,
    t1=None,
    t2=None,
    t3=None,
):
    row, part = _split(SPLITS)
    x_row = X + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
    r_row = RESIDUAL + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, r0, r1, r2, r3)
    t_row = TOTAL + row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, t0, t1, t2, t3)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(part * BLOCK, HIDDEN, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        x = tl.load(x_row + column_offsets(column, x_column), mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(r_row + column_offsets(column, r_column), mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(TOTAL.dtype.element_ty)
        tl.store(t_row + column, total, mask=inside)
        total = total.to(tl.float32)
        squares += total * total
    tl.store(SUMS + row.to(tl.int64) * SPLITS + part, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["rows", "groups", "n1", "n2", "n3"])
def _backward_columns(
    DY,
    TOTAL,
    DTOTAL,
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
    COLUMN_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    group = tl.program_id(0) // COLUMN_BLOCKS
    column = (tl.program_id(0) % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dy_columns = DY + column_offsets(column, dy_column)
    t_columns = TOTAL + column_offsets(column, t_column)
    dt_columns = DTOTAL + column_offsets(column, dt_column)
    if DX is not None and W is not None:
        factor = factor_of(tl.load(W + column, mask=inside, other=0.0), offset, LLAMA)
    if PARTIAL is not None:
        of_weight = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, BLOCK_ROWS), groups, num_stages=STAGES):
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
            of_weight += tl.sum(dy * normed, 0)
        if DX is not None:
            dt_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dt0, dt1, dt2, dt3)
            straight = tl.load(dt_columns[None, :] + dt_row[:, None], mask=mask, other=0.0)
            if W is not None:
                dy *= factor[None, :]
            dots = DOTS + row.to(tl.int64)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
            shift = tl.sum(tl.load(dots, mask=valid[:, None], other=0.0), 1)[:, None] / HIDDEN
            dx = (dy - normed * shift) * rstd + straight.to(tl.float32)
            dx_row = row_offsets(row, HIDDEN, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
            tl.store(DX + dx_row[:, None] + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    if PARTIAL is not None:
        tl.store(PARTIAL + group.to(tl.int64) * HIDDEN + column, of_weight, mask=inside)


def forward_column_split(
    x: Tensor,
    residual: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """``splits`` programs a row, in blocks of ``block`` columns: sums and their squares first, then the norm."""
    y, rstd = allocate(x, weight, casting)
    total = allocate_like(x)
    hidden, rows = x.shape[-1], rstd.shape[0]
    sums = rstd.new_empty((rows, splits))
    options = {"num_warps": num_warps, **options_for(device, waves_per_eu)}
    constants = {"HIDDEN": hidden, "BLOCK": block, "SPLITS": splits}
    row_dims, strides, reads, writes = walk((x, residual), (total,))
    launch(_add, (rows * splits,), *reads, *writes, sums, rows, *strides, **constants, ROW_DIMS=row_dims, **options)
    finish((total,), writes)
    row_dims, strides, reads, writes = walk((total,), (y,))
    launch(
        _normalise,
        (rows * splits,),
        *reads,
        dense_vector(weight),
        sums,
        *writes,
        rstd,
        rows,
        eps,
        offset,
        *strides,
        **constants,
        LLAMA=casting == "llama",
        ROW_DIMS=row_dims,
        **options,
    )
    finish((y,), writes)
    return y, total, rstd


def backward_column_split(
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
    splits: int,
    block: int,
    block_rows: int,
    programs_per_unit: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> Gradients:
    """The dots of the rows in ``splits`` parts first, then gradients by blocks of columns and groups of rows."""
    weighted = weight if needs[2] else None
    weight, rstd = dense_vector(weight), dense_vector(rstd)
    dx = allocate_like(new_residual) if needs[0] or needs[1] else None
    row_dims, strides, reads, writes = walk((dy, new_residual, dnew_residual), (dx,))
    hidden, rows = new_residual.shape[-1], rstd.shape[0]
    options = {"num_warps": num_warps, **options_for(device, waves_per_eu)}
    constants = {"HIDDEN": hidden, "BLOCK": block, "SPLITS": splits, "LLAMA": casting == "llama", "ROW_DIMS": row_dims}
    dots = None
    if dx is not None:
        dots = rstd.new_empty((rows, splits))
        tensors = *reads[:2], weight, rstd, dots
        launch(_dots, (rows * splits,), *tensors, rows, offset, *strides[:13], **constants, **options)
    column_blocks = -(-hidden // block)
    most = -(-programs_per_unit * device.units // column_blocks)
    groups = min(-(-rows // block_rows), most)
    partial = None if weighted is None else rstd.new_empty((groups, hidden))
    if dx is not None or partial is not None:
        launch(
            _backward_columns,
            (groups * column_blocks,),
            *reads,
            weight,
            rstd,
            dots,
            *writes,
            partial,
            rows,
            groups,
            offset,
            *strides,
            **constants,
            BLOCK_ROWS=block_rows,
            STAGES=num_stages,
            **options,
        )
    finish((dx,), writes)
    return gradients_of(dx, partial, weighted, needs, most)
