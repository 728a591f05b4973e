"""From statistics of rows to their losses and the sums of these: a launch over the rows, and a small one behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._logits import own_columns
from liger_registry.launch import launch

# Rows of a block; blocks of a program that reduces all of them by itself; programs where one would take too long.
_ROWS, _ALONE, _MOST = 1024, 8, 128


@triton.jit
def finite(log):
    """A log, 0 in place of -inf: what is taken from it is -inf then, whose exponential is 0."""
    return tl.where(log == -float("inf"), 0.0, log)


@triton.jit
def reciprocal(number):
    """1 / number, correctly rounded; 0 of 0: nothing to count is no loss."""
    nothing = number == 0.0
    return tl.where(nothing, 0.0, tl.div_rn(1.0, tl.where(nothing, 1.0, number)))


@triton.jit
def log1p(y):
    """``log(1 + y)`` for y from 0 to 1, to a few roundings however small y is."""
    u = 1.0 + y
    lost = u == 1.0
    # The error of the sum is divided out: log(u) / (u - 1) is as good as log(1 + y) / y.
    return tl.where(lost, y, tl.log(u) * (y / tl.where(lost, 1.0, u - 1.0)))


@triton.jit
def softmax_split(log_rest, target_logit):
    """``-log p`` of the target, the logsumexp, and the shares of the rest and of the target; none of them cancels."""
    # Both are +-inf at once only where the row has no softmax: NaN.
    difference = log_rest - target_logit
    e = tl.exp(-tl.abs(difference))
    more = difference > 0.0
    tail = log1p(e)
    nll = tl.where(more, difference, 0.0) + tail
    nll = tl.where((target_logit == float("inf")) | (difference != difference), float("nan"), nll)
    lse = tl.where(more, log_rest, target_logit) + tail
    whole = 1.0 / (1.0 + e)
    return nll, lse, tl.where(more, whole, e * whole), tl.where(more, e * whole, whole)


@triton.jit
def _finish(main, squares, weights, count, right, NUM_ITEMS, LOSS, Z_LOSS, ACCURACY, COUNTS, MEAN: tl.constexpr):
    """Store sums and means."""
    tl.store(COUNTS, weights)
    tl.store(COUNTS + 1, count)
    share, square_share, whole = 1.0, 1.0, reciprocal(count)
    if NUM_ITEMS is not None:
        whole = reciprocal(tl.load(NUM_ITEMS).to(tl.float32))
        share, square_share = whole, whole
    elif MEAN:
        share, square_share = reciprocal(weights), whole
    squares *= square_share
    tl.store(LOSS, main * share + squares)
    if Z_LOSS is not None:
        tl.store(Z_LOSS, squares)
    if ACCURACY is not None:
        tl.store(ACCURACY, right * whole)


@triton.jit(do_not_specialize=["rows", "ignored"])
def _losses(
    TARGET,
    W,
    TOTAL,
    NUM_ITEMS,
    LOG_REST,
    TARGET_LOGIT,
    WEIGHTED_SUM,
    PREDICTION,
    LOSS,
    Z_LOSS,
    ACCURACY,
    COUNTS,
    PARTS,
    rows,
    ignored,
    smoothing,
    square,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    SQUARED: tl.constexpr,
    MEAN: tl.constexpr,
):
    smoothing = tl.cast(smoothing, tl.float32)
    square = tl.cast(square, tl.float32)
    main_sum = tl.zeros([BLOCK], tl.float32)
    square_sum = tl.zeros([BLOCK], tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    right = tl.zeros([BLOCK], tl.float32)
    total = tl.cast(VOCAB, tl.float32)
    if TOTAL is not None:
        total = tl.load(TOTAL)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0), num_stages=1):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        active = row < rows
        target = tl.load(TARGET + row, mask=active, other=-1)
        own = own_columns(target, VOCAB)
        counted = active & (target != ignored)
        valid = counted & (own >= 0)
        log_rest = tl.load(LOG_REST + row, mask=valid, other=0.0)
        target_logit = tl.load(TARGET_LOGIT + row, mask=valid, other=0.0)
        nll, lse, _, _ = softmax_split(log_rest, target_logit)
        weight = tl.where(valid, 1.0, 0.0)
        if W is not None:
            weight = tl.load(W + own, mask=valid, other=0.0).to(tl.float32)
        main = weight * nll
        if WEIGHTED_SUM is not None:
            weighted = tl.load(WEIGHTED_SUM + row, mask=valid, other=0.0)
            main = (1.0 - smoothing) * main + smoothing / VOCAB * (total * lse - weighted)
        nothing = tl.where(counted, float("nan"), 0.0)
        main = tl.where(valid, main, nothing)
        squares = tl.zeros_like(main)
        if SQUARED:
            squares = tl.where(valid, square * lse * lse, nothing)
        hit = tl.zeros_like(main)
        if PREDICTION is not None:
            guess = tl.load(PREDICTION + row, mask=valid, other=-1)
            hit = tl.where(valid & (guess == target), 1.0, 0.0)
        if BY_ROW:
            tl.store(LOSS + row, main + squares, mask=active)
            if Z_LOSS is not None:
                tl.store(Z_LOSS + row, squares, mask=active)
            if ACCURACY is not None:
                tl.store(ACCURACY + row, hit, mask=active)
        else:
            main_sum += main
            square_sum += squares
            weight_sum += weight
            count += tl.where(counted, 1.0, 0.0)
            right += hit
    if not BY_ROW:
        sums = tl.sum(main_sum, 0), tl.sum(square_sum, 0), tl.sum(weight_sum, 0), tl.sum(count, 0), tl.sum(right, 0)
        if PARTS is None:
            _finish(sums[0], sums[1], sums[2], sums[3], sums[4], NUM_ITEMS, LOSS, Z_LOSS, ACCURACY, COUNTS, MEAN)
        else:
            into = PARTS + tl.program_id(0)
            tl.store(into, sums[0])
            tl.store(into + tl.num_programs(0), sums[1])
            tl.store(into + 2 * tl.num_programs(0), sums[2])
            tl.store(into + 3 * tl.num_programs(0), sums[3])
            tl.store(into + 4 * tl.num_programs(0), sums[4])


@triton.jit(do_not_specialize=["parts"])
def _sum_losses(PARTS, NUM_ITEMS, LOSS, Z_LOSS, ACCURACY, COUNTS, parts, BLOCK: tl.constexpr, MEAN: tl.constexpr):
    part = tl.arange(0, BLOCK)
    mask = part < parts
    main = tl.sum(tl.load(PARTS + part, mask=mask, other=0.0), 0)
    squares = tl.sum(tl.load(PARTS + parts + part, mask=mask, other=0.0), 0)
    weights = tl.sum(tl.load(PARTS + 2 * parts + part, mask=mask, other=0.0), 0)
    count = tl.sum(tl.load(PARTS + 3 * parts + part, mask=mask, other=0.0), 0)
    right = tl.sum(tl.load(PARTS + 4 * parts + part, mask=mask, other=0.0), 0)
    _finish(main, squares, weights, count, right, NUM_ITEMS, LOSS, Z_LOSS, ACCURACY, COUNTS, MEAN)


def reduce_rows(
    target: Tensor,
    class_weight: Tensor | None,
    total: Tensor | None,
    num_items: Tensor | None,
    log_rest: Tensor | None,
    target_logit: Tensor | None,
    weighted_sum: Tensor | None,
    prediction: Tensor | None,
    loss: Tensor | None,
    z_loss: Tensor | None,
    accuracy: Tensor | None,
    counts: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    *,
    vocab: int,
    reduction: str,
) -> None:
    """Fill loss, z_loss, accuracy and counts, None for those that are not wanted.

    Args:
        target: (rows,), contiguous, as are all of (rows,).
        class_weight: (vocab,), contiguous, or None.
        total: the sum of the class weights where losses are smoothed, or None.
        num_items: the denominator in place of the rows' own, or None.
        log_rest: (rows,).
        target_logit: (rows,).
        weighted_sum: (rows,) where losses are smoothed, or None.
        prediction: (rows,) where accuracy is wanted, or None.
        loss: a scalar, or without reduction the shape of the targets, as are z_loss and accuracy.
        z_loss: the squares' part.
        accuracy: right predictions.
        counts: (2,), what means divide by without num_items; None without reduction.
        ignore_index: targets that are not counted.
        label_smoothing: the share of the uniform distribution.
        lse_square_scale: the factor of the squares.
        vocab: the number of classes.
        reduction: ``mean``, ``sum`` or ``none``.
    """
    rows, by_row = target.numel(), reduction == "none"
    programs, parts = -(-rows // _ROWS), None
    if not by_row:
        # Without rows too a program writes the sums.
        programs = 1 if programs <= _ALONE else min(programs, _MOST)
        if programs > 1:
            parts = target.new_empty((5, programs), dtype=torch.float32)
    launch(
        _losses,
        (programs,),
        target,
        class_weight,
        total,
        num_items,
        log_rest,
        target_logit,
        weighted_sum,
        prediction if accuracy is not None else None,
        loss,
        z_loss,
        accuracy,
        counts,
        parts,
        rows,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        VOCAB=vocab,
        BLOCK=_ROWS,
        BY_ROW=by_row,
        SQUARED=lse_square_scale != 0,
        MEAN=reduction == "mean",
        num_warps=8,
    )
    if parts is not None:
        launch(
            _sum_losses,
            (1,),
            parts,
            num_items,
            loss,
            z_loss,
            accuracy,
            counts,
            programs,
            BLOCK=_MOST,
            MEAN=reduction == "mean",
            num_warps=4,
        )
