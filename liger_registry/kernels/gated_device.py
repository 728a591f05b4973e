"""Device code of gated activations: contiguous tensors as they lie in memory, and tiles of rows by strides.

Values of ``ACT`` are those of ``activations``. ``UP`` is None where there is no second factor, or ``PACKED`` says that
``GATE`` holds it; ``DGATE`` and ``DUP`` are None where they are not needed. Multipliers are None where all are 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_registry.kernels._rows import column_offsets, row_ids, row_offsets
from liger_registry.kernels.activations import activation, value_and_slope


@triton.jit
def result(gate, up, gate_multiplier, down_multiplier, dtype: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr):
    """The forward's result. Products of bf16 or fp16 numbers are exact in fp32, so each is rounded once."""
    x = gate.to(tl.float32)
    if gate_multiplier is not None:
        x = (x * tl.cast(gate_multiplier, tl.float32)).to(gate.dtype).to(tl.float32)
    y = activation(x, ACT)
    if GATED:
        y = y.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    if down_multiplier is not None:
        y = y.to(dtype).to(tl.float32) * tl.cast(down_multiplier, tl.float32)
    return y.to(dtype)


@triton.jit
def factors(dy, gate, gate_multiplier, down_multiplier, ACT: tl.constexpr):
    """Gradient of the product, activation, and its derivative by the gate, all in fp32."""
    dy = dy.to(tl.float32)
    if down_multiplier is not None:
        dy *= tl.cast(down_multiplier, tl.float32)
    x = gate.to(tl.float32)
    if gate_multiplier is not None:
        x *= tl.cast(gate_multiplier, tl.float32)
    y, slope = value_and_slope(x, ACT)
    if gate_multiplier is not None:
        slope *= tl.cast(gate_multiplier, tl.float32)
    return dy, y, slope


# The number of elements is rows * WIDTH, so that the compiler knows what divides it: with a mask of an unknown bound it
# would load element by element.


@triton.jit(do_not_specialize=["rows"])
def forward_flat(
    GATE, UP, Y, rows, gate_multiplier, down_multiplier, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr
):
    """``y`` of contiguous tensors."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < tl.cast(rows, tl.int64) * WIDTH - start
    gate = tl.load(GATE + start + index, mask=mask, other=0.0)
    up = gate
    if UP is not None:
        up = tl.load(UP + start + index, mask=mask, other=0.0)
    y = result(gate, up, gate_multiplier, down_multiplier, Y.dtype.element_ty, UP is not None, ACT)
    tl.store(Y + start + index, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward_flat(
    DY,
    GATE,
    UP,
    DGATE,
    DUP,
    rows,
    gate_multiplier,
    down_multiplier,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
):
    """Gradients of contiguous tensors."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < tl.cast(rows, tl.int64) * WIDTH - start
    gate = tl.load(GATE + start + index, mask=mask, other=0.0)
    dy = tl.load(DY + start + index, mask=mask, other=0.0)
    dy, y, slope = factors(dy, gate, gate_multiplier, down_multiplier, ACT)
    if DUP is not None:
        tl.store(DUP + start + index, (dy * y).to(DUP.dtype.element_ty), mask=mask)
    if DGATE is not None:
        if UP is not None:
            dy *= tl.load(UP + start + index, mask=mask, other=0.0).to(tl.float32)
        tl.store(DGATE + start + index, (dy * slope).to(DGATE.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def forward_rows(
    GATE,
    UP,
    Y,
    rows,
    gate_multiplier,
    down_multiplier,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    PACKED: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    gate_column=None,
    gate0=None,
    gate1=None,
    gate2=None,
    gate3=None,
    up_column=None,
    up0=None,
    up1=None,
    up2=None,
    up3=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
):
    """``y`` by rows; the arguments behind ``ROW_DIMS`` are those of ``strided``."""
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    PITCH: tl.constexpr = 2 * WIDTH if PACKED else WIDTH
    tiles = tl.cdiv(rows, BLOCK_ROWS) * COLUMNS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        column = (tile % COLUMNS) * BLOCK + tl.arange(0, BLOCK)
        row = row_ids(tile // COLUMNS, rows, BLOCK_ROWS)
        mask = (row < tl.cast(rows, row.dtype))[:, None] & (column < WIDTH)[None, :]
        gate_row = row_offsets(row, PITCH, ROW_DIMS, n1, n2, n3, gate0, gate1, gate2, gate3)
        gate = tl.load(GATE + gate_row[:, None] + column_offsets(column, gate_column)[None, :], mask=mask, other=0.0)
        up = gate
        if PACKED:
            second = column_offsets(WIDTH + column, gate_column)
            up = tl.load(GATE + gate_row[:, None] + second[None, :], mask=mask, other=0.0)
        elif UP is not None:
            up_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, up0, up1, up2, up3)
            up = tl.load(UP + up_row[:, None] + column_offsets(column, up_column)[None, :], mask=mask, other=0.0)
        GATED: tl.constexpr = PACKED or UP is not None
        y = result(gate, up, gate_multiplier, down_multiplier, Y.dtype.element_ty, GATED, ACT)
        y_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        tl.store(Y + y_row[:, None] + column[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def backward_rows(
    DY,
    GATE,
    UP,
    DGATE,
    DUP,
    rows,
    gate_multiplier,
    down_multiplier,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    PACKED: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    dy_column=None,
    dy0=None,
    dy1=None,
    dy2=None,
    dy3=None,
    gate_column=None,
    gate0=None,
    gate1=None,
    gate2=None,
    gate3=None,
    up_column=None,
    up0=None,
    up1=None,
    up2=None,
    up3=None,
    dgate0=None,
    dgate1=None,
    dgate2=None,
    dgate3=None,
    dup0=None,
    dup1=None,
    dup2=None,
    dup3=None,
):
    """Gradients by rows; the arguments behind ``ROW_DIMS`` are those of ``strided``."""
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    PITCH: tl.constexpr = 2 * WIDTH if PACKED else WIDTH
    tiles = tl.cdiv(rows, BLOCK_ROWS) * COLUMNS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        column = (tile % COLUMNS) * BLOCK + tl.arange(0, BLOCK)
        row = row_ids(tile // COLUMNS, rows, BLOCK_ROWS)
        mask = (row < tl.cast(rows, row.dtype))[:, None] & (column < WIDTH)[None, :]
        dy_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
        dy = tl.load(DY + dy_row[:, None] + column_offsets(column, dy_column)[None, :], mask=mask, other=0.0)
        gate_row = row_offsets(row, PITCH, ROW_DIMS, n1, n2, n3, gate0, gate1, gate2, gate3)
        gate = tl.load(GATE + gate_row[:, None] + column_offsets(column, gate_column)[None, :], mask=mask, other=0.0)
        dy, y, slope = factors(dy, gate, gate_multiplier, down_multiplier, ACT)
        if PACKED:
            second = column_offsets(WIDTH + column, gate_column)
            up = tl.load(GATE + gate_row[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
            d_row = row_offsets(row, PITCH, ROW_DIMS, n1, n2, n3, dgate0, dgate1, dgate2, dgate3)[:, None]
            tl.store(DGATE + d_row + column[None, :], (dy * up * slope).to(DGATE.dtype.element_ty), mask=mask)
            tl.store(DGATE + d_row + (WIDTH + column)[None, :], (dy * y).to(DGATE.dtype.element_ty), mask=mask)
        else:
            if DUP is not None:
                d_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dup0, dup1, dup2, dup3)[:, None]
                tl.store(DUP + d_row + column[None, :], (dy * y).to(DUP.dtype.element_ty), mask=mask)
            if DGATE is not None:
                if UP is not None:
                    up_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, up0, up1, up2, up3)[:, None]
                    up = tl.load(UP + up_row + column_offsets(column, up_column)[None, :], mask=mask, other=0.0)
                    dy *= up.to(tl.float32)
                d_row = row_offsets(row, WIDTH, ROW_DIMS, n1, n2, n3, dgate0, dgate1, dgate2, dgate3)[:, None]
                tl.store(DGATE + d_row + column[None, :], (dy * slope).to(DGATE.dtype.element_ty), mask=mask)
