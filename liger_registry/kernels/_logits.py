"""Device code of losses over logits: statistics of rows of logits in blocks of columns, and the gradient of a tile.

A tile is (BLOCK_ROWS, BLOCK). The target's column is kept apart from the others, so that neither loss nor gradient of a
confident row cancels; see ``liger_registry.ops._logits``. All of it is in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_registry.kernels._rows import column_offsets

# What maxima begin with: finite, so that no -inf is ever taken from another.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NOWHERE = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh_and_slope(u):
    """``tanh(u)`` and its derivative, both to a few roundings, from one exponential.

    Below .3 the quotient of exponentials cancels; there a series to u^11 is off by 2e-9 at most. The derivative is
    ``4 e / (1 + e)^2`` with ``e = exp(-2 |u|)``, which unlike ``1 - tanh^2`` keeps its digits where tanh is nearly 1.
    """
    size = tl.abs(u)
    e = tl.exp(-2.0 * size)
    r = 1.0 / (1.0 + e)
    far = (1.0 - e) * r
    small = tl.maximum(tl.minimum(u, 1.0), -1.0)
    s = small * small
    series = 0.021869488 - 0.008863235 * s
    series = -0.053968254 + s * series
    series = 0.13333333 + s * series
    series = -0.33333333 + s * series
    near = small + small * s * series
    return tl.where(size < 0.3, near, tl.where(u < 0.0, -far, far)), 4.0 * e * r * r


@triton.jit
def power(difference):
    """``exp(difference)``, 0 where that is below the normal numbers of fp32.

    Triton's ``exp`` is this product and an exponential to the base of 2, but keeps the digits of subnormal results too,
    which no sum of shares has a use for: three instructions more of some fourteen that an element costs.
    """
    return tl.exp2(difference * LOG2_E)


@triton.jit
def own_columns(target, VOCAB: tl.constexpr):
    """The columns of targets, int32, -1 where a target lies outside [0, VOCAB)."""
    return tl.where((target >= 0) & (target < VOCAB), target, -1).to(tl.int32)


@triton.jit
def is_own(lane, target, first):
    """Whether columns ``first + lane`` are those of targets, (rows, lanes).

    Places within a block are compared: of columns themselves ptxas makes 64-bit numbers, which take two instructions.
    """
    return lane[None, :] == (target - first)[:, None]


@triton.jit
def scan(
    x_rows,
    x_column,
    W,
    active,
    target,
    start,
    step,
    softcap,
    scale,
    VOCAB: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ENTROPY: tl.constexpr,
    PREDICT: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """The statistics of blocks of columns that begin at ``start`` and lie ``step`` apart, kept for each lane.

    A lane is GROUP neighbouring columns, those of one load of 16 bytes of bf16, so one thread holds it. Its sum counts
    from its own maximum, so that blocks wait for no reduction across threads, and is rescaled once a block for all of
    the group: an element costs one exponential and a handful of instructions. With a maximum of its own for each
    column the pass over 8192 x 128256 took 861 us on an H200, where reading takes 492. Many short sums also keep the
    tail of a vocabulary, which one long sum drops.

    Args:
        x_rows: (BLOCK_ROWS, 1) pointers to the rows.
        x_column: the stride of columns, None for 1.
        W: class weights, None for weights of 1.
        active: (BLOCK_ROWS, 1), whether a row is read at all.
        target: (BLOCK_ROWS,) columns, -1 for none.
        start: the first block's first column.
        step: columns from a block to the next.
        softcap: fp32, if CAPPED.
        scale: a factor on the logits, None for 1.
        SINGLE: whether there is one block.

    Returns:
        maxima, sums of exponentials, sums of exponentials times z (each without the target), weighted sums of z,
        largest scaled logits and their columns, each (BLOCK_ROWS, BLOCK / GROUP); a single block's are those of its
        columns, (BLOCK_ROWS, BLOCK).
    """
    GROUP: tl.constexpr = 1 if SINGLE else 8
    LANES: tl.constexpr = BLOCK // GROUP
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK_ROWS, LANES], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS, LANES], tl.float32)
    moment = tl.zeros([BLOCK_ROWS, LANES], tl.float32)
    weighted = tl.zeros([BLOCK_ROWS, LANES], tl.float32)
    best = tl.full([BLOCK_ROWS, LANES], -float("inf"), tl.float32)
    position = tl.zeros([BLOCK_ROWS, LANES], tl.int32) + (start + tl.arange(0, LANES) * GROUP)[None, :]
    for first in tl.range(start, VOCAB, step, num_stages=STAGES):
        column = first + lane
        inside = (column < VOCAB)[None, :]
        x = tl.load(x_rows + column_offsets(column, x_column)[None, :], mask=inside & active, other=-float("inf")).to(
            tl.float32
        )
        u = x if scale is None else x * scale
        if CAPPED:
            value, _ = tanh_and_slope(u / softcap)
            z = softcap * value
        else:
            z = u
        rest = tl.where(is_own(lane, target, first), -float("inf"), z)
        if CAPPED or scale is not None:
            # What lies outside was loaded as -inf, which a softcap makes finite and a negative factor turns round.
            rest = tl.where(inside & active, rest, -float("inf"))
        if WEIGHTED:
            if W is None:
                term = tl.where(inside & active, z, 0.0)
            else:
                weight = tl.load(W + column, mask=column < VOCAB, other=1.0).to(tl.float32)
                term = tl.where(inside & active, z * weight[None, :], 0.0)
        if SINGLE:
            largest = tl.where(rest == -float("inf"), LOWEST, rest)
            total = tl.where(rest == -float("inf"), 0.0, 1.0)
            if ENTROPY:
                moment = tl.where(rest == -float("inf"), 0.0, rest)
            if WEIGHTED:
                weighted = term
            if PREDICT:
                best = tl.where(inside & (u > best), u, best)
        else:
            group = tl.reshape(rest, [BLOCK_ROWS, LANES, GROUP])
            highest = tl.maximum(largest, tl.max(group, 2))
            # Of a difference, not of a product less a product: there the maximum would be rounded once more.
            e = power(group - highest[:, :, None])
            kept = tl.exp(largest - highest)
            total = total * kept + tl.sum(e, 2)
            if ENTROPY:
                moment = moment * kept + tl.sum(e * tl.where(group == -float("inf"), 0.0, group), 2)
            largest = highest
            if WEIGHTED:
                weighted += tl.sum(tl.reshape(term, [BLOCK_ROWS, LANES, GROUP]), 2)
            if PREDICT:
                known = tl.reshape(tl.where(inside, u, -float("inf")), [BLOCK_ROWS, LANES, GROUP])
                winner = tl.max(known, 2)
                columns = tl.reshape(column, [1, LANES, GROUP])
                where = tl.min(tl.where(known == winner[:, :, None], columns, NOWHERE), 2)
                better = winner > best
                best = tl.where(better, winner, best)
                position = tl.where(better, where, position)
    return largest, total, moment, weighted, best, position


@triton.jit
def merge(
    largest,
    total,
    moment,
    weighted,
    best,
    position,
    WEIGHTED: tl.constexpr,
    ENTROPY: tl.constexpr,
    PREDICT: tl.constexpr,
):
    """The statistics of rows from those of their lanes, or of their parts: (rows, n) each to (rows,)."""
    top = tl.max(largest, 1)
    factor = tl.exp(largest - top[:, None])
    total = tl.sum(total * factor, 1)
    moment = tl.sum(moment * factor, 1) if ENTROPY else total
    weighted = tl.sum(weighted, 1) if WEIGHTED else total
    if PREDICT:
        winner = tl.max(best, 1)
        position = tl.min(tl.where(best == winner[:, None], position, NOWHERE), 1)
    else:
        winner = total
        position = tl.zeros_like(total).to(tl.int32)
    return top, total, moment, weighted, winner, position


@triton.jit
def log_of(top, total):
    """``top + log(total)``, -inf of an empty sum."""
    empty = total == 0.0
    return tl.where(empty, -float("inf"), top + tl.log(tl.where(empty, 1.0, total)))


@triton.jit
def mean_with(target_logit, there, top, total, moment):
    """The mean of z under the softmax of the row, the target's column included; NaN of a row of -inf alone."""
    own = tl.where(there, target_logit, -float("inf"))
    common = tl.maximum(top, own)
    factor, mine = tl.exp(top - common), tl.exp(own - common)
    whole = total * factor + mine
    nothing = whole == 0.0
    terms = moment * factor + tl.where(own == -float("inf"), 0.0, own) * mine
    return tl.where(nothing, float("nan"), terms / tl.where(nothing, 1.0, whole))


@triton.jit
def share_of(z, log):
    """``exp(z - log)``, at most 1; NaN stays.

    A share of a sum is. But logits that a backward computes again, by a product of another shape, may be off by a
    rounding, 32 for one of 5,000 in bf16, and ``exp(96)`` is infinite, and NaN times the 0 of a row without gradient.
    """
    return power(tl.minimum(z - log, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def gradient_tile(
    x,
    own,
    rest_factor,
    rest_log,
    own_gradient,
    weighted_factor,
    weight,
    mean_factor,
    total_log,
    mean,
    softcap,
    scale,
    CAPPED: tl.constexpr,
):
    """The gradient of a tile of logits, fp32.

    Args:
        x: (BLOCK_ROWS, BLOCK) logits, -inf where there are none.
        own: (BLOCK_ROWS, BLOCK), whether a logit is its row's target.
        rest_factor: (BLOCK_ROWS,) factor of ``exp(z - rest_log)`` in all columns but the target's.
        rest_log: (BLOCK_ROWS,) finite, the log of their sum.
        own_gradient: (BLOCK_ROWS,) gradient of the target's z.
        weighted_factor: (BLOCK_ROWS,) factor of the class weights, None for no such term.
        weight: (BLOCK,) class weights, None for weights of 1.
        mean_factor: (BLOCK_ROWS,) gradient of the mean of z, None for no such term.
        total_log: (BLOCK_ROWS,) finite, the log of the sum of all exponentials.
        mean: (BLOCK_ROWS,) the mean of z.
        softcap: fp32, if CAPPED.
        scale: a factor on the logits, None for 1.
    """
    u = x if scale is None else x * scale
    if CAPPED:
        value, slope = tanh_and_slope(u / softcap)
        z = softcap * value
    else:
        z = u
    dz = rest_factor[:, None] * share_of(z, rest_log[:, None])
    dz = tl.where(own, own_gradient[:, None], dz)
    if weighted_factor is not None:
        if weight is None:
            dz += weighted_factor[:, None]
        else:
            dz += weighted_factor[:, None] * weight[None, :]
    if mean_factor is not None:
        share = mean_factor[:, None] * share_of(z, total_log[:, None])
        dz += share * tl.where(z == -float("inf"), 0.0, 1.0 + z - mean[:, None])
    if CAPPED:
        dz *= slope
    return dz if scale is None else dz * scale
