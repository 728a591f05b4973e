"""``logit_cosine`` in Triton; the formula is that of ``liger_registry.ops.logit_cosine``.

Launch functions take ``(student, teacher, shift_labels, scale)`` with logits (rows, vocab) whose rows may be strided,
labels (rows,) or None, scale 0-dim or None, and return ``(distance, nll, slope)``, None in place of what is not asked
for.

A row is walked over twice: for its sums, and for the gradient. A pair of elements of 16 bits takes 8 bytes read and 2
written, with the cross-entropy or without, less what the cache still has for the second walk, which goes backwards.

From the sums ``A = s . s``, ``B = t . t``, ``D = s . t`` and ``E = |s - t|^2`` comes the distance: where rows are far
from each other ``1 - D / (|s| |t|)``, and where they are near ``(E - (|s| - |t|)^2) / (2 |s| |t|)``, which keeps the
digits that the former rounds away. Its derivative is ``(s D / A - t) / (|s| |t|)``. Equal rows have equal sums, to the
bit, so that both are exactly 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._cross_entropy_rows import finite, softmax_split
from liger_registry.kernels._logits import LOWEST, log_of, own_columns, power, share_of
from liger_registry.kernels.divergences_device import row_counts
from liger_registry.kernels.logit_cosine_heuristics import NUMBERS, PARTS, SHORTEST
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

_SHORTEST = tl.constexpr(SHORTEST)
_PARTS = tl.constexpr(PARTS)
_NUMBERS = tl.constexpr(NUMBERS)


@triton.jit
def _load(row, column, mask):
    return tl.load(row + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _own_of(LABELS, row, counts, VOCAB: tl.constexpr):
    """The column of a row's label; -1 where that is no class, and of a row that does not count."""
    return tl.where(counts, own_columns(tl.load(LABELS + row), VOCAB), -1)


@triton.jit
def _sums_of(
    s_row, t_row, own, start, step, counts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """``s . s``, ``t . t``, ``s . t`` and ``|s - t|^2`` of blocks that begin at start and lie step apart.

    With HARD also the largest logit of the student's other than the label's, and the sum of exponentials from it.

    Sums are kept for GROUP neighbouring columns, which one thread has of one load: those of each column would take 64
    registers a thread in place of 40 on sm_90, for the same number of instructions. Where a load has fewer columns than
    a group, threads would have to exchange them, 76 instructions an element in place of 34.
    """
    LANES: tl.constexpr = BLOCK // GROUP
    lane = tl.arange(0, BLOCK)
    aa = tl.zeros([LANES], tl.float32)
    bb = tl.zeros([LANES], tl.float32)
    dd = tl.zeros([LANES], tl.float32)
    ee = tl.zeros([LANES], tl.float32)
    largest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in tl.range(start, VOCAB, step, num_stages=STAGES):
        column = first + lane
        mask = (column < VOCAB) & counts
        s, t = _load(s_row, column, mask), _load(t_row, column, mask)
        gap = s - t
        aa += tl.sum(tl.reshape(s * s, [LANES, GROUP]), 1)
        bb += tl.sum(tl.reshape(t * t, [LANES, GROUP]), 1)
        dd += tl.sum(tl.reshape(s * t, [LANES, GROUP]), 1)
        ee += tl.sum(tl.reshape(gap * gap, [LANES, GROUP]), 1)
        if HARD:
            rest = tl.where(mask & (lane != own - first), s, -float("inf"))
            group = tl.reshape(rest, [LANES, GROUP])
            highest = tl.maximum(largest, tl.max(group, 1))
            total = total * tl.exp(largest - highest) + tl.sum(power(group - highest[:, None]), 1)
            largest = highest
    top, whole = 0.0, 0.0
    if HARD:
        top = tl.max(largest, 0)
        whole = tl.sum(total * tl.exp(largest - top), 0)
    return tl.sum(aa, 0), tl.sum(bb, 0), tl.sum(dd, 0), tl.sum(ee, 0), top, whole


@triton.jit
def _angle(aa, bb, dd, ee):
    """The distance, and what its derivative ``(t - s * ratio) * factor`` consists of."""
    s_size, t_size = tl.sqrt_rn(aa), tl.sqrt_rn(bb)
    # Of NaN neither is true, and all that follows is NaN.
    nothing = (s_size < _SHORTEST) | (t_size < _SHORTEST)
    none = dd - dd
    both = tl.where(nothing, 1.0, s_size * t_size)
    apart = tl.div_rn(aa - bb, tl.where(nothing, 1.0, s_size + t_size))
    near = tl.div_rn(ee - apart * apart, 2.0 * both)
    distance = tl.where(ee < both, near, 1.0 - tl.div_rn(dd, both))
    # Of parallel rows of different lengths it is a rounding of either sign.
    distance = tl.maximum(distance, 0.0, propagate_nan=tl.PropagateNan.ALL)
    ratio = tl.div_rn(dd, tl.where(nothing, 1.0, aa))
    return tl.where(nothing, 1.0 + none, distance), ratio, tl.where(nothing, none, -tl.div_rn(1.0, both))


@triton.jit
def _likelihood(top, whole, target_logit, own, counts):
    """The negative log-probability of a label, the log of the other columns' sum of exponentials, and their share.

    Of a row that does not count the share is 0, as are all sums, so that its gradient is without a mask.
    """
    log_rest = log_of(top, whole)
    nll, _, share, _ = softmax_split(log_rest, target_logit)
    # A label that is no class spoils the row.
    there = own >= 0
    share = tl.where(there, share, float("nan"))
    return tl.where(there, nll, float("nan")), finite(log_rest), tl.where(counts, share, 0.0)


@triton.jit
def _store_losses(DISTANCE, NLL, row, distance, nll, counts):
    tl.store(DISTANCE + row, tl.where(counts, distance, 0.0))
    if NLL is not None:
        tl.store(NLL + row, tl.where(counts, nll, 0.0))


@triton.jit
def _store_slopes(
    s_row, t_row, o_row, own, part, counts, ratio, factor, log_rest, share,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Store the gradient of every SPLITS-th block, the last first: the cache has them still."""
    lane = tl.arange(0, BLOCK)
    blocks = (tl.cdiv(VOCAB, BLOCK) - part + SPLITS - 1) // SPLITS
    for step in tl.range(0, blocks, num_stages=STAGES):
        first = (part + (blocks - 1 - step) * SPLITS) * BLOCK
        column = first + lane
        inside = column < VOCAB
        mask = inside & counts
        s, t = _load(s_row, column, mask), _load(t_row, column, mask)
        slope = (t - s * ratio) * factor
        if HARD:
            slope += tl.where(lane == own - first, -share, share * share_of(s, log_rest))
        tl.store(o_row + column, slope.to(o_row.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])
def _rows(
    S, T, LABELS, SCALE, DISTANCE, NLL, OUT, s_step, t_step, o_step, ignore_index, soft, hard,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HARD: tl.constexpr = NLL is not None
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row = S + row * s_step, T + row * t_step
    counts = row_counts(LABELS, row, ignore_index)
    own, target_logit = -1, 0.0
    if HARD:
        own = _own_of(LABELS, row, counts, VOCAB)
        # Before the sums, whose barriers keep it before the gradient, which may lie in its place.
        target_logit = tl.load(s_row + own, mask=own >= 0, other=0.0).to(tl.float32)
    aa, bb, dd, ee, top, whole = _sums_of(s_row, t_row, own, 0, BLOCK, counts, VOCAB, BLOCK, GROUP, STAGES, HARD)
    distance, ratio, factor = _angle(aa, bb, dd, ee)
    nll, log_rest, share = 0.0, 0.0, 0.0
    if HARD:
        nll, log_rest, share = _likelihood(top, whole, target_logit, own, counts)
    _store_losses(DISTANCE, NLL, row, distance, nll, counts)
    if OUT is not None:
        soft, hard = tl.cast(soft, tl.float32), tl.cast(hard, tl.float32)
        upstream = 1.0 if SCALE is None else tl.load(SCALE).to(tl.float32)
        _store_slopes(
            s_row, t_row, OUT + row * o_step, own, 0, counts, ratio, factor * soft * upstream, log_rest,
            share * hard * upstream, VOCAB, BLOCK, 1, STAGES, HARD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ignore_index"])
def _sums(
    S, T, LABELS, PART_SUMS, TARGET_LOGIT, s_step, t_step, ignore_index,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The sums of parts of rows, neighbours on one row; and the target's logit, which a gradient may overwrite."""
    HARD: tl.constexpr = TARGET_LOGIT is not None
    row, part = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    s_row = S + row * s_step
    counts = row_counts(LABELS, row, ignore_index)
    own = -1
    if HARD:
        own = _own_of(LABELS, row, counts, VOCAB)
        if part == 0:
            tl.store(TARGET_LOGIT + row, tl.load(s_row + own, mask=own >= 0, other=0.0).to(tl.float32))
    aa, bb, dd, ee, top, whole = _sums_of(
        s_row, T + row * t_step, own, part * BLOCK, SPLITS * BLOCK, counts, VOCAB, BLOCK, GROUP, 1, HARD
    )
    into = PART_SUMS + row * (_PARTS * SPLITS) + part
    tl.store(into, aa)
    tl.store(into + SPLITS, bb)
    tl.store(into + 2 * SPLITS, dd)
    tl.store(into + 3 * SPLITS, ee)
    if HARD:
        tl.store(into + 4 * SPLITS, top)
        tl.store(into + 5 * SPLITS, whole)


@triton.jit(do_not_specialize=["ignore_index"])
def _join(
    LABELS, SCALE, PART_SUMS, TARGET_LOGIT, DISTANCE, NLL, FOUND, ignore_index, soft, hard,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The losses of rows from the sums of their parts, and the numbers that their gradients consist of."""
    row = tl.program_id(0).to(tl.int64)
    soft, hard = tl.cast(soft, tl.float32), tl.cast(hard, tl.float32)
    counts = row_counts(LABELS, row, ignore_index)
    parts = PART_SUMS + row * (_PARTS * SPLITS) + tl.arange(0, SPLITS)
    aa, bb = tl.sum(tl.load(parts), 0), tl.sum(tl.load(parts + SPLITS), 0)
    dd, ee = tl.sum(tl.load(parts + 2 * SPLITS), 0), tl.sum(tl.load(parts + 3 * SPLITS), 0)
    distance, ratio, factor = _angle(aa, bb, dd, ee)
    nll, log_rest, share = 0.0, 0.0, 0.0
    if NLL is not None:
        largest = tl.load(parts + 4 * SPLITS)
        top = tl.max(largest, 0)
        whole = tl.sum(tl.load(parts + 5 * SPLITS) * tl.exp(largest - top), 0)
        own = _own_of(LABELS, row, counts, VOCAB)
        nll, log_rest, share = _likelihood(top, whole, tl.load(TARGET_LOGIT + row), own, counts)
    _store_losses(DISTANCE, NLL, row, distance, nll, counts)
    if FOUND is not None:
        upstream = 1.0 if SCALE is None else tl.load(SCALE).to(tl.float32)
        into = FOUND + row * _NUMBERS
        tl.store(into, ratio)
        tl.store(into + 1, factor * soft * upstream)
        tl.store(into + 2, log_rest)
        tl.store(into + 3, share * hard * upstream)


@triton.jit(do_not_specialize=["ignore_index"])
def _slopes(
    S, T, LABELS, FOUND, OUT, s_step, t_step, o_step, ignore_index,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    row, part = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    counts = row_counts(LABELS, row, ignore_index)
    own = -1
    if HARD:
        own = _own_of(LABELS, row, counts, VOCAB)
    found = FOUND + row * _NUMBERS
    ratio, factor, log_rest, share = tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3)
    _store_slopes(
        S + row * s_step, T + row * t_step, OUT + row * o_step, own, part, counts, ratio, factor, log_rest, share,
        VOCAB, BLOCK, SPLITS, 1, HARD,
    )  # fmt: skip


def _dense(logits: Tensor) -> Tensor:
    """Logits whose columns lie side by side; a slab's do, and others are copied."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def _columns_a_load(*logits: Tensor) -> int:
    """How many columns a thread loads at once: 16 bytes of them, fewer where a mask or a row ends between those."""
    if any(t.stride(0) % 16 for t in logits):  # the multiple that compilers are told of
        return 1
    return math.gcd(logits[0].shape[1], 16 // max(t.element_size() for t in logits))


def _prepared(
    student: Tensor, teacher: Tensor, labels: Tensor | None, cross_entropy: bool, gradient: bool, in_place: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """The inputs as the kernels read them, and empty ``(distance, nll, slope)``."""
    out = None
    if gradient:
        # Rows that share memory, as of an expanded tensor, are never written.
        own = in_place and student.stride(-1) == 1 and student.stride(0) >= student.shape[1]
        out = student if own else torch.empty_like(student, memory_format=torch.contiguous_format)
    distance = student.new_empty(student.shape[0], dtype=torch.float32)
    nll = torch.empty_like(distance) if cross_entropy else None
    return _dense(student), _dense(teacher), None if labels is None else labels.contiguous(), distance, nll, out


def _options(num_warps: int, waves_per_eu: int | None) -> dict[str, int]:
    return {"num_warps": num_warps} if waves_per_eu is None else {"num_warps": num_warps, "waves_per_eu": waves_per_eu}


def forward_row(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    soft: float,
    hard: float,
    cross_entropy: bool,
    ignore_index: int,
    gradient: bool,
    in_place: bool,
    block: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A program a row."""
    s, t, labels, distance, nll, out = _prepared(student, teacher, labels, cross_entropy, gradient, in_place)
    steps = (s.stride(0), t.stride(0), 0 if out is None else out.stride(0))
    launch(
        _rows,
        (s.shape[0],),
        *(s, t, labels, scale, distance, nll, out, *steps, ignore_index, soft, hard),
        VOCAB=s.shape[1],
        BLOCK=block,
        GROUP=_columns_a_load(s, t),
        STAGES=num_stages,
        **_options(num_warps, waves_per_eu),
    )
    return distance, nll, out


def forward_column_split(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    soft: float,
    hard: float,
    cross_entropy: bool,
    ignore_index: int,
    gradient: bool,
    in_place: bool,
    block: int,
    splits: int,
    num_warps: int,
    waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows in ``splits`` parts, blocks of columns in turn, and a launch for each walk, with a small one in between."""
    s, t, labels, distance, nll, out = _prepared(student, teacher, labels, cross_entropy, gradient, in_place)
    rows = s.shape[0]
    sums = distance.new_empty((rows, PARTS, splits))
    targets = None if nll is None else torch.empty_like(distance)
    found = None if out is None else distance.new_empty((rows, NUMBERS))
    steps = (s.stride(0), t.stride(0))
    same = {"VOCAB": s.shape[1], "SPLITS": splits}
    options = {"BLOCK": block, **_options(num_warps, waves_per_eu)}
    tensors = (s, t, labels, sums, targets, *steps, ignore_index)
    launch(_sums, (rows * splits,), *tensors, GROUP=_columns_a_load(s, t), **same, **options)
    numbers = (ignore_index, soft, hard)
    launch(_join, (rows,), labels, scale, sums, targets, distance, nll, found, *numbers, **same, num_warps=1)
    if out is not None:
        strides = (*steps, out.stride(0), ignore_index)
        launch(_slopes, (rows * splits,), s, t, labels, found, out, *strides, HARD=nll is not None, **same, **options)
    return distance, nll, out
