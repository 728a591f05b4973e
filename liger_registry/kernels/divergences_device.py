"""Terms of divergences and their derivatives, element by element: device code that several kernels share.

``KIND`` is which: ``mixture`` is the Jensen-Shannon divergence of two log-probabilities x (of the student, q) and y (of
the teacher, p), ``forward`` and ``reverse`` the KL divergences p (y - x) and q (x - y) of log-probabilities, ``plain``
the first of them with p itself for y, ``distance`` half the absolute difference of two probabilities. Two zeros give 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_registry.kernels._rows import column_offsets, row_offsets


@triton.jit
def exp_minus_1(value, exponential):
    """exp(value) - 1 for values of at most 0, right to a rounding also near 0."""
    # The ninth power of .5 over 9! is 5e-9: eight terms are as good as fp32.
    series = 1.0 + value * (1.0 / 8)
    series = 1.0 + value * (1.0 / 7) * series
    series = 1.0 + value * (1.0 / 6) * series
    series = 1.0 + value * (1.0 / 5) * series
    series = 1.0 + value * (1.0 / 4) * series
    series = 1.0 + value * (1.0 / 3) * series
    series = value + value * value * 0.5 * series
    return tl.where(value > -0.5, series, exponential - 1.0)


@triton.jit
def log_1_plus(value):
    """log(1 + value) for values in (-1, 0], right to a rounding also near 0.

    What 1 + value loses is added again. It should be divided by 1 + value first, but it is 0 below 1/2, and above that
    the division changes less than half a rounding of the result.
    """
    near = 1.0 + value
    return tl.log(near) + (value - (near - 1.0))


@triton.jit
def mixture(x, y, higher, difference, share, rest):
    """``(rest q (x - log m), share p (y - log m))`` with m = share p + rest q; higher is x >= y, difference x - y.

    All is measured from the larger of both, so that equal elements give exactly 0, and no exponential overflows. Gaps
    end at -104, where the exponential is 0 already; so does that of -inf in both, which is no number. Both are given:
    a difference may have digits that x and y lack, and where it has none x >= y saves registers, 2 spills on sm_90.
    """
    gap = -tl.abs(difference)
    gap = tl.where(gap >= -104.0, gap, -104.0)
    ratio = tl.exp(gap)
    lower_share = tl.where(higher, share, rest)
    log_m = log_1_plus(lower_share * exp_minus_1(gap, ratio))
    largest = tl.exp(tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    upper = -tl.where(higher, rest, share) * log_m * largest
    lower = lower_share * ratio * (gap - log_m) * largest
    return tl.where(higher, upper, lower), tl.where(higher, lower, upper)


@triton.jit
def weighted(weight, value):
    """weight * value, 0 where the weight is: it may be that of -inf, and the value infinite."""
    return weight * tl.where(weight == 0.0, 0.0, value)


@triton.jit
def term(x, y, first, second, KIND: tl.constexpr):
    """An element's term; ``first`` and ``second`` are the shares of a mixture, or ``first`` the floor of ``plain``."""
    if KIND == "mixture":
        of_x, of_y = mixture(x, y, x >= y, x - y, first, second)
        found = of_x + of_y
    elif KIND == "forward":
        found = weighted(tl.exp(y), y - x)
    elif KIND == "reverse":
        found = weighted(tl.exp(x), x - y)
    elif KIND == "plain":
        found = weighted(y, tl.log(tl.maximum(y, first)) - x)
    else:
        found = tl.abs(x - y) * 0.5
    return found


@triton.jit
def slope(x, y, first, second, KIND: tl.constexpr):
    """The term's derivative by x."""
    if KIND == "mixture":
        found, _ = mixture(x, y, x >= y, x - y, first, second)
    elif KIND == "forward":
        found = -tl.exp(y)
    elif KIND == "reverse":
        found = weighted(tl.exp(x), x - y + 1.0)
    elif KIND == "plain":
        found = -y
    else:
        # x - y is NaN where either is, and then so is this.
        difference = x - y
        found = tl.where(difference > 0.0, 0.5, tl.where(difference < 0.0, -0.5, difference * 0.0))
    return found


@triton.jit
def _block_of(task, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VOCAB: tl.constexpr):
    """The row and the columns of a task, blocks of a row one after the other."""
    column = (task % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    return tl.cast(task // BLOCKS, tl.int64), column, column < VOCAB


@triton.jit
def row_counts(LABELS, row, ignore_index):
    """Whether a row counts."""
    return True if LABELS is None else tl.load(LABELS + row) != tl.cast(ignore_index, LABELS.dtype.element_ty)


@triton.jit(do_not_specialize=["tasks", "step", "ignore_index", "n1", "n2", "n3"])
def forward_blocks(
    X,
    Y,
    LABELS,
    OUT,
    tasks,
    step,
    ignore_index,
    first,
    second,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    WALK: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
    y_column=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
    o0=None,
    o1=None,
    o2=None,
    o3=None,
):
    """Terms of the blocks that a program walks over: one by one, or their sum, one a program."""
    first, second = tl.cast(first, tl.float32), tl.cast(second, tl.float32)
    BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    # A program a row takes its blocks one after the other; others take a block, and go on by the size of the grid.
    begin = tl.program_id(0) * BLOCKS if not WALK else tl.program_id(0)
    end = begin + BLOCKS if not WALK else tasks
    for task in tl.range(begin, end, step, num_stages=STAGES):
        row, column, inside = _block_of(task, BLOCKS, BLOCK, VOCAB)
        mask = inside & row_counts(LABELS, row, ignore_index)
        x_row = X + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
        y_row = Y + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        x = tl.load(x_row + column_offsets(column, x_column), mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_row + column_offsets(column, y_column), mask=mask, other=0.0).to(tl.float32)
        found = term(x, y, first, second, KIND)
        if ELEMENTWISE:
            o_row = OUT + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, o0, o1, o2, o3)
            tl.store(o_row + column, found.to(OUT.dtype.element_ty), mask=inside)
        else:
            total += found
    if not ELEMENTWISE:
        tl.store(OUT + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["count", "rows", "ignore_index"])
def add_up(PARTS, LABELS, LOSS, SCALE, count, rows, ignore_index, factor, BLOCK: tl.constexpr):
    """The loss as the sum of partial sums times ``factor``; with SCALE over the number of rows that count, too."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.load(PARTS + part, mask=part < count, other=0.0)
    scale = tl.cast(factor, tl.float32)
    if SCALE is not None:
        counted = tl.zeros([BLOCK], tl.int32)
        ignored = tl.cast(ignore_index, LABELS.dtype.element_ty)
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            counted += (tl.load(LABELS + row, mask=row < rows, other=ignored) != ignored).to(tl.int32)
        scale = tl.div_rn(scale, tl.maximum(tl.sum(counted, 0), 1).to(tl.float32))
        tl.store(SCALE, scale)
    tl.store(LOSS, (tl.sum(total, 0) * scale).to(LOSS.dtype.element_ty))


@triton.jit(do_not_specialize=["tasks", "step", "ignore_index", "n1", "n2", "n3"])
def backward_blocks(
    DY,
    X,
    Y,
    LABELS,
    SCALE,
    DX,
    tasks,
    step,
    ignore_index,
    factor,
    first,
    second,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    WALK: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
    y_column=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
    dy_column=None,
    dy0=None,
    dy1=None,
    dy2=None,
    dy3=None,
    dx0=None,
    dx1=None,
    dx2=None,
    dx3=None,
):
    """The gradient of the blocks that a program walks over, with the upstream gradient and all factors in it."""
    first, second = tl.cast(first, tl.float32), tl.cast(second, tl.float32)
    BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    upstream = tl.cast(factor, tl.float32)
    if SCALE is not None:
        upstream *= tl.load(SCALE)
    if not ELEMENTWISE:
        upstream *= tl.load(DY).to(tl.float32)
    begin = tl.program_id(0) * BLOCKS if not WALK else tl.program_id(0)
    end = begin + BLOCKS if not WALK else tasks
    for task in tl.range(begin, end, step, num_stages=STAGES):
        row, column, inside = _block_of(task, BLOCKS, BLOCK, VOCAB)
        counts = row_counts(LABELS, row, ignore_index)
        mask = inside & counts
        y_row = Y + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)
        y = tl.load(y_row + column_offsets(column, y_column), mask=mask, other=0.0).to(tl.float32)
        if KIND == "forward" or KIND == "plain":
            x = y  # the derivative does not depend on it
        else:
            x_row = X + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)
            x = tl.load(x_row + column_offsets(column, x_column), mask=mask, other=0.0).to(tl.float32)
        dx = slope(x, y, first, second, KIND)
        if ELEMENTWISE:
            dy_row = DY + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, dy0, dy1, dy2, dy3)
            dx *= tl.load(dy_row + column_offsets(column, dy_column), mask=mask, other=0.0).to(tl.float32)
        else:
            dx *= upstream
        if LABELS is not None:
            dx = tl.where(counts, dx, 0.0)
        dx_row = DX + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, dx0, dx1, dx2, dx3)
        tl.store(dx_row + column, dx.to(DX.dtype.element_ty), mask=inside)
