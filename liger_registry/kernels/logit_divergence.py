"""``logit_divergence`` in Triton; the formula is that of ``liger_registry.ops.logit_divergence``.

Launch functions take ``(student, teacher, shift_labels, scale)`` with logits (rows, vocab) whose rows may be strided,
labels (rows,) or None, scale 0-dim or None, and return ``(loss, slope)``, a slope of None where it is not asked for.

A row is walked over three times: maxima and sums of exponentials of both, then the loss and the sum of the derivatives
by the log-probabilities, which the third, the gradient, needs. The forward divergence needs two: that sum is -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels.divergences import kind_of
from liger_registry.kernels.divergences_device import mixture, row_counts, weighted
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit
def _anchored(maximum):
    """What exponents count from: the maximum, and 0 where all of it is -inf, so that no -inf meets another."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _grown(maximum, total, value, factor):
    """The maximum and the sum of exponentials, kept apart for each column, with a block more."""
    larger = tl.maximum(maximum, tl.max(value, 0))
    anchor = _anchored(larger)
    return larger, total * tl.exp((maximum - anchor) * factor) + tl.exp((value - anchor) * factor)


@triton.jit
def _load(row, column, mask, other):
    return tl.load(row + column, mask=mask, other=other).to(tl.float32)


@triton.jit
def _less(value, maximum, EXACT: tl.constexpr):
    """``value - maximum``, and what that lost to rounding, 0 if EXACT says that it loses next to nothing (Knuth)."""
    found = value - maximum
    if EXACT:
        return found, tl.zeros_like(found)
    back = found - value
    lost = (value - (found - back)) - (maximum + back)
    return found, tl.where(lost == lost, lost, 0.0)  # of -inf NaN


@triton.jit
def _logs(s_row, t_row, column, mask, factor, s_max, s_log, t_max, t_log):
    """Log-probabilities x and y of a block, and x - y.

    The maximum is subtracted first: logits near it lose nothing to that, and its own difference is 0. Scaled before,
    they would be rounded, and the maximum too; but a GPU makes one operation of a product and a difference and takes
    the product unrounded, so that the maximum would differ from itself by up to a rounding, 2e-4 for one of 6,000.
    x - y comes from these differences and keeps the digits that x and y, rounded at their own size, do not have: those
    of -28.551 and -28.542 are 4 of 7, of which all of the loss is made.
    """
    # In place of what is no column the maximum, which gives no infinity.
    s = _load(s_row, column, mask, s_max)
    t = _load(t_row, column, mask, t_max)
    # 16 bits have 11 digits at most, and a difference of two is rounded only beyond 2^13 times the smaller.
    s, s_lost = _less(s, s_max, s_row.dtype.element_ty != tl.float32)
    t, t_lost = _less(t, t_max, t_row.dtype.element_ty != tl.float32)
    difference = ((s - t) + (s_lost - t_lost)) * factor - (s_log - t_log)
    return s * factor - s_log, t * factor - t_log, difference


@triton.jit
def _term(x, y, difference, one, two, KIND: tl.constexpr):
    """Each element's term, and the part of it that is the derivative by x, of a reverse divergence without its 1."""
    if KIND == "mixture":
        of_x, of_y = mixture(x, y, difference >= 0.0, difference, one, two)
        found = of_x + of_y
    elif KIND == "reverse":
        found = weighted(tl.exp(x), difference)
        of_x = found
    else:
        found = weighted(tl.exp(y), -difference)
        of_x = found
    return found, of_x


@triton.jit
def _log_sum(total):
    """The logarithm of a sum of exponentials; NaN of nothing but -inf, as torch's log-probabilities are."""
    empty = total == 0.0
    return tl.where(empty, float("nan"), tl.log(tl.where(empty, 1.0, total)))


@triton.jit
def _sums_of(s_row, t_row, start, step, counts, factor, VOCAB: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Maxima of the logits, and sums of exponentials from them, of blocks that begin at start and lie step apart."""
    s_max = tl.cast(-float("inf"), tl.float32)
    t_max = tl.cast(-float("inf"), tl.float32)
    s_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, VOCAB, step, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        mask = (column < VOCAB) & counts
        s_max, s_sum = _grown(s_max, s_sum, _load(s_row, column, mask, -float("inf")), factor)
        t_max, t_sum = _grown(t_max, t_sum, _load(t_row, column, mask, -float("inf")), factor)
    return s_max, tl.sum(s_sum, 0), t_max, tl.sum(t_sum, 0)


@triton.jit
def _terms_of(
    s_row, t_row, start, step, counts, factor, s_max, s_log, t_max, t_log, one, two,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The sums of terms, and of derivatives by the log-probabilities; of the reverse divergence without its 1."""
    loss = tl.zeros([BLOCK], tl.float32)
    slopes = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, VOCAB, step, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        mask = (column < VOCAB) & counts
        x, y, difference = _logs(s_row, t_row, column, mask, factor, s_max, s_log, t_max, t_log)
        found, of_x = _term(x, y, difference, one, two, KIND)
        loss += tl.where(mask, found, 0.0)
        if KIND == "mixture":
            slopes += tl.where(mask, of_x, 0.0)
    total = tl.sum(loss, 0)
    return total, tl.sum(slopes, 0) if KIND == "mixture" else total


@triton.jit
def _store_slopes(
    s_row, t_row, o_row, start, step, counts, factor, s_max, s_log, t_max, t_log, total, upstream, one, two,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store the gradient by the student's logits, and return the sum of terms where nobody took it before."""
    loss = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, VOCAB, step, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        inside = column < VOCAB
        mask = inside & counts
        x, y, difference = _logs(s_row, t_row, column, mask, factor, s_max, s_log, t_max, t_log)
        q = tl.exp(x)
        if KIND == "reverse":
            slope = weighted(q, difference - total)
        else:
            found, of_x = _term(x, y, difference, one, two, KIND)
            if KIND == "mixture":
                slope = of_x - q * total
            else:
                slope = q - tl.exp(y)
                loss += tl.where(mask, found, 0.0)
        slope = tl.where(mask, slope * upstream, 0.0)
        tl.store(o_row + column, slope.to(o_row.dtype.element_ty), mask=inside)
    return tl.sum(loss, 0)


@triton.jit(do_not_specialize=["ignore_index"])
def _rows(
    S, T, LABELS, SCALE, LOSS, OUT, s_step, t_step, o_step, ignore_index, factor, one, two,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor, one, two = tl.cast(factor, tl.float32), tl.cast(one, tl.float32), tl.cast(two, tl.float32)
    s_row, t_row = S + row * s_step, T + row * t_step
    counts = row_counts(LABELS, row, ignore_index)
    s_max, s_sum, t_max, t_sum = _sums_of(s_row, t_row, 0, BLOCK, counts, factor, VOCAB, BLOCK, STAGES)
    # Apart: the sum of both would be rounded, alike for all columns, which adds up.
    s_max, s_log, t_max, t_log = _anchored(s_max), _log_sum(s_sum), _anchored(t_max), _log_sum(t_sum)
    loss = 0.0
    total = 0.0
    if KIND != "forward" or OUT is None:
        loss, total = _terms_of(
            s_row, t_row, 0, BLOCK, counts, factor, s_max, s_log, t_max, t_log, one, two, VOCAB, BLOCK, STAGES, KIND
        )
    if OUT is not None:
        upstream = factor if SCALE is None else factor * tl.load(SCALE).to(tl.float32)
        found = _store_slopes(
            s_row, t_row, OUT + row * o_step, 0, BLOCK, counts, factor, s_max, s_log, t_max, t_log, total, upstream,
            one, two, VOCAB, BLOCK, STAGES, KIND,
        )  # fmt: skip
        if KIND == "forward":
            loss = found
    tl.store(LOSS + row, loss)


@triton.jit
def _split(SPLITS: tl.constexpr):
    """The row and the part of it that this program works on, neighbours on one row."""
    return (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS


@triton.jit(do_not_specialize=["ignore_index"])
def _sums(
    S, T, LABELS, PARTS, s_step, t_step, ignore_index, factor,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, part = _split(SPLITS)
    factor = tl.cast(factor, tl.float32)
    counts = row_counts(LABELS, row, ignore_index)
    s_max, s_sum, t_max, t_sum = _sums_of(
        S + row * s_step, T + row * t_step, part * BLOCK, SPLITS * BLOCK, counts, factor, VOCAB, BLOCK, 1
    )
    into = PARTS + row * (4 * SPLITS) + part
    tl.store(into, s_max)
    tl.store(into + SPLITS, s_sum)
    tl.store(into + 2 * SPLITS, t_max)
    tl.store(into + 3 * SPLITS, t_sum)


@triton.jit
def _put_together(parts, factor, SPLITS: tl.constexpr):
    """A row's maximum and the logarithm of its sum of exponentials from those of its parts."""
    maxima = tl.load(parts + tl.arange(0, SPLITS))
    anchor = _anchored(tl.max(maxima, 0))
    sums = tl.load(parts + SPLITS + tl.arange(0, SPLITS))
    return anchor, _log_sum(tl.sum(sums * tl.exp((maxima - anchor) * factor), 0))


@triton.jit(do_not_specialize=["ignore_index"])
def _terms(
    S, T, LABELS, PARTS, TERMS, s_step, t_step, ignore_index, factor, one, two,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row, part = _split(SPLITS)
    factor, one, two = tl.cast(factor, tl.float32), tl.cast(one, tl.float32), tl.cast(two, tl.float32)
    counts = row_counts(LABELS, row, ignore_index)
    parts = PARTS + row * (4 * SPLITS)
    s_max, s_log = _put_together(parts, factor, SPLITS)
    t_max, t_log = _put_together(parts + 2 * SPLITS, factor, SPLITS)
    loss, slopes = _terms_of(
        S + row * s_step, T + row * t_step, part * BLOCK, SPLITS * BLOCK, counts, factor,
        s_max, s_log, t_max, t_log, one, two, VOCAB, BLOCK, 1, KIND,
    )  # fmt: skip
    into = TERMS + row * (2 * SPLITS) + part
    tl.store(into, loss)
    tl.store(into + SPLITS, slopes)


@triton.jit(do_not_specialize=["ignore_index"])
def _slopes(
    S, T, LABELS, SCALE, PARTS, TERMS, OUT, s_step, t_step, o_step, ignore_index, factor, one, two,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row, part = _split(SPLITS)
    factor, one, two = tl.cast(factor, tl.float32), tl.cast(one, tl.float32), tl.cast(two, tl.float32)
    counts = row_counts(LABELS, row, ignore_index)
    parts = PARTS + row * (4 * SPLITS)
    s_max, s_log = _put_together(parts, factor, SPLITS)
    t_max, t_log = _put_together(parts + 2 * SPLITS, factor, SPLITS)
    total = tl.sum(tl.load(TERMS + row * (2 * SPLITS) + SPLITS + tl.arange(0, SPLITS)), 0)
    upstream = factor if SCALE is None else factor * tl.load(SCALE).to(tl.float32)
    _store_slopes(
        S + row * s_step, T + row * t_step, OUT + row * o_step, part * BLOCK, SPLITS * BLOCK, counts, factor,
        s_max, s_log, t_max, t_log, total, upstream, one, two, VOCAB, BLOCK, 1, KIND,
    )  # fmt: skip


def _dense(logits: Tensor) -> Tensor:
    """Logits whose columns lie side by side; a slab's do, and others are copied."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def _prepared(
    student: Tensor, teacher: Tensor, labels: Tensor | None, gradient: bool, in_place: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    out = None
    if gradient:
        own = in_place and student.stride(-1) == 1
        out = student if own else torch.empty_like(student, memory_format=torch.contiguous_format)
    labels = None if labels is None else labels.contiguous()
    losses = student.new_empty(student.shape[0], dtype=torch.float32)
    return _dense(student), _dense(teacher), labels, out, losses


def _options(num_warps: int, waves_per_eu: int | None) -> dict[str, int]:
    return {"num_warps": num_warps} if waves_per_eu is None else {"num_warps": num_warps, "waves_per_eu": waves_per_eu}


def forward_row(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    beta: float,
    ignore_index: int,
    temperature: float,
    gradient: bool,
    in_place: bool,
    block: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A program a row, whose second and third walk find in the cache what the first one read."""
    s, t, labels, out, loss = _prepared(student, teacher, labels, gradient, in_place)
    kind, one, two = kind_of({"beta": beta})
    steps = (s.stride(0), t.stride(0), 0 if out is None else out.stride(0))
    launch(
        _rows,
        (s.shape[0],),
        *(s, t, labels, scale, loss, out, *steps, ignore_index, 1.0 / temperature, one, two),
        VOCAB=s.shape[1],
        BLOCK=block,
        STAGES=num_stages,
        KIND=kind,
        **_options(num_warps, waves_per_eu),
    )
    return loss, out


def forward_column_split(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    beta: float,
    ignore_index: int,
    temperature: float,
    gradient: bool,
    in_place: bool,
    block: int,
    splits: int,
    num_warps: int,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows in ``splits`` parts, blocks of columns in turn, and a launch for each walk."""
    s, t, labels, out, _ = _prepared(student, teacher, labels, gradient, in_place)
    kind, one, two = kind_of({"beta": beta})
    rows, factor = s.shape[0], 1.0 / temperature
    parts = s.new_empty((rows, 4, splits), dtype=torch.float32)
    found = s.new_empty((rows, 2, splits), dtype=torch.float32)
    steps = (s.stride(0), t.stride(0))
    sizes = {"VOCAB": s.shape[1], "BLOCK": block, "SPLITS": splits, **_options(num_warps, waves_per_eu)}
    launch(_sums, (rows * splits,), s, t, labels, parts, *steps, ignore_index, factor, **sizes)
    numbers = (ignore_index, factor, one, two)
    launch(_terms, (rows * splits,), s, t, labels, parts, found, *steps, *numbers, KIND=kind, **sizes)
    if out is not None:
        tensors = (s, t, labels, scale, parts, found, out)
        launch(_slopes, (rows * splits,), *tensors, *steps, out.stride(0), *numbers, KIND=kind, **sizes)
    return found[:, 0].sum(-1), out
