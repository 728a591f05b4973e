"""Distillation over two output heads by slabs of rows: gradients are computed while a slab's logits are there.

Three matrix products for the student and one for the teacher, around a divergence of both slabs and, where it is
wanted, the cross-entropy of the student's. Memory is two slabs of logits, or three with a cross-entropy that is not
computed together with the divergence.

What is done to a slab is an operation of the registry wherever it is none of the user's own. Products and slabs are
those of ``fused_linear_jsd``, so that what was tuned for it, or pinned, decides how many rows a slab has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from liger_registry.autograd import once
from liger_registry.chunked_loss.divergence import Cosine, Divergence, pieces
from liger_registry.chunked_loss.head import Head
from liger_registry.decision import HEURISTIC, REFERENCE
from liger_registry.kernels.compact import compact
from liger_registry.kernels.linear_heuristics import MOST_ROUNDINGS, SLAB_ROWS, default_rows
from liger_registry.kernels.linear_products import (
    add_columns,
    add_product,
    cut_slab,
    logits_into,
    new_slab,
    row_slabs,
    scaled,
    wide,
)
from liger_registry.ops._logits import derivative, transformed
from liger_registry.problem import FORWARD
from liger_registry.runtime import registry

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """What is computed of two heads.

    Attributes:
        divergence: of both slabs; None where its weight is 0.
        hard: whether the cross-entropy is computed.
        weight_soft: the factor of the divergence.
        weight_hard: that of the cross-entropy.
        ignore_index: the label of rows that do not count.
        temperature: what logits are divided by before the divergence.
        head: how they are made, of both heads.
    """

    divergence: Divergence | None
    hard: bool
    weight_soft: float
    weight_hard: float
    ignore_index: int
    temperature: float
    head: Head


@dataclass(frozen=True, slots=True)
class Model:
    """One of both models: hidden states (rows, width), weight (vocab, width), bias (vocab,) or None."""

    states: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def vocab(self) -> int:
        """The size of its vocabulary."""
        return self.weight.shape[0]


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _together(job: Job, alike: bool) -> Cosine | None:
    """The divergence that computes the cross-entropy too; None where both are apart.

    Args:
        job: what is computed.
        alike: whether both vocabularies are of one size; the divergence has the logits of the larger one.
    """
    return job.divergence if isinstance(job.divergence, Cosine) and job.hard and alike else None


def plan(job: Job, student: Model, teacher: Model, rows: int) -> tuple[int, bool]:
    """The rows of a slab, and whether the head's gradient is summed in fp32 over them.

    What was tuned for ``fused_linear_jsd``, or pinned, is taken where it fits the budget. Else a slab has no fewer rows
    than keep matrix products at full rate and no less than a quarter of all, so that the head's gradient is rounded
    four times at most; a smaller budget takes the most rows that it holds.
    """
    dtype = student.states.dtype
    narrow = wide(dtype) != dtype
    apart = job.hard and _together(job, student.vocab == teacher.vocab) is None

    def wide_sums(size: int) -> bool:
        return narrow and (dtype == torch.float16 or -(-rows // size) > MOST_ROUNDINGS)

    def cost(size: int) -> int:
        columns = max(student.vocab, teacher.vocab)
        slabs = columns * (dtype.itemsize * (1 + apart + (job.head.softcap is not None)))
        slabs += columns * teacher.states.dtype.itemsize
        sums = student.weight.numel() * 4 if wide_sums(size) else 0
        return min(size, rows) * slabs + sums + rows * student.states.shape[1] * dtype.itemsize

    wanted, budget = default_rows(rows), job.head.memory_budget
    budget = registry.settings.memory_budget if budget is None else budget
    tuned = _tuned(job, student, teacher)
    if tuned is not None and (budget is None or cost(tuned[0]) <= budget):
        return tuned[0], narrow and (tuned[1] or wide_sums(tuned[0]))
    if budget is None:
        return wanted, wide_sums(wanted)
    fit = [size for size in SLAB_ROWS if size <= wanted and cost(size) <= budget]
    size = fit[-1] if fit else SLAB_ROWS[0]
    return size, wide_sums(size)


def _tuned(job: Job, student: Model, teacher: Model) -> tuple[int, bool] | None:
    """The rows of a slab and whether sums are wide, as decided for ``fused_linear_jsd``; None for its heuristic."""
    if student.vocab != teacher.vocab or student.states.is_meta or student.states.shape[0] == 0:
        return None
    op = registry.op("fused_linear_jsd")
    labels = student.states.new_empty((), dtype=torch.int64).expand(student.states.shape[0])
    tensors = (student.states, student.weight, teacher.states, teacher.weight, labels)
    options = op.bind(tensors, {})[1]
    decision, _ = registry.choose(op, tensors, options, FORWARD, (True, True), budget=job.head.memory_budget)
    if decision.source in (HEURISTIC, REFERENCE):
        return None
    config = decision.config
    rows: Any = config.get("slab_rows", student.states.shape[0])  # ``single`` has none
    return int(rows), config.get("sums") == "float32"


def compute(
    job: Job, student: Model, teacher: Model, labels: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    """Loss, divergence and cross-entropy, 0-dim each, and the gradients of the loss by the student's tensors.

    Args:
        job: what is computed.
        student: the one that learns.
        teacher: of the same rows and no smaller vocabulary; that which it has more stands against logits of 0.
        labels: (rows,), int64.
        needs: which of the student's states, weight and bias need a gradient.
    """
    states, dtype = student.states, wide(student.states.dtype)
    counted = labels != job.ignore_index
    share = counted.sum().clamp_min(1).to(dtype).reciprocal()
    kept = compact(labels, job.ignore_index, job.head.compact, states.numel() * student.vocab)
    if kept is not None:
        labels, counted = labels[kept], counted[kept]
    count = labels.shape[0]
    late = states.dtype == torch.float16  # a share of many rows' mean is below its smallest numbers
    size, wide_sums = plan(job, student, teacher, count)
    held = dtype if late else states.dtype
    d_states = d_weight = d_bias = None
    if needs[0]:
        new = torch.zeros_like if kept is not None else torch.empty_like
        d_states = new(states, dtype=held, memory_format=torch.contiguous_format)
    if needs[1]:
        d_weight = student.weight.new_empty(student.weight.shape, dtype=dtype if wide_sums else held)
    if needs[2] and student.bias is not None:
        d_bias = student.weight.new_empty(student.vocab, dtype=dtype)
    soft, hard = (states.new_zeros((), dtype=dtype) for _ in range(2))
    factor = torch.ones_like(share) if late else share
    columns = max(student.vocab, teacher.vocab)
    memories = [new_slab(m.states, min(size, count), columns) for m in (student, teacher)]
    for here in row_slabs(count, size):
        slabs = [cut_slab(memory, here.stop - here.start, columns) for memory in memories]
        picked: Any = here if kept is None else kept[here]
        parts = [m.states[picked] for m in (student, teacher)]
        for slab, part, model in zip(slabs, parts, (student, teacher), strict=True):
            if model is student or job.divergence is not None:
                logits_into(slab[:, : model.vocab], part, model.weight, model.bias)
                slab[:, model.vocab :] = 0
        told = factor if any(needs) else None
        one, two = _slab(job, slabs[0], slabs[1], labels[here], counted[here], student.vocab, told)
        soft, hard = soft + one, hard + two
        slope, first = slabs[0][:, : student.vocab], here.start == 0
        if d_states is not None:
            if kept is None:
                add_product(d_states[here], slope, student.weight, True)
            else:
                found = d_states.new_empty((count if count < size else here.stop - here.start, states.shape[1]))
                add_product(found, slope, student.weight, True)
                d_states.index_copy_(0, kept[here], found)
        if d_weight is not None:
            add_product(d_weight, slope.t(), parts[0], first)
        if d_bias is not None:
            add_columns(d_bias, slope, first)
    if count == 0:
        d_weight, d_bias = (None if g is None else g.zero_() for g in (d_weight, d_bias))
    soft, hard = soft * share, hard * share
    if late:
        d_states, d_weight, d_bias = (None if g is None else g.mul_(share) for g in (d_states, d_weight, d_bias))
    grads = [None if g is None else g.to(states.dtype) for g in (d_states, d_weight, d_bias)]
    return job.weight_hard * hard + job.weight_soft * soft, soft, hard, (grads[0], grads[1], grads[2])


def _slab(
    job: Job, student: Tensor, teacher: Tensor, labels: Tensor, counted: Tensor, vocab: int, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sums of a slab's divergences and cross-entropies; with a factor their gradient, in the student's slab."""
    soft = hard = torch.zeros((), dtype=wide(student.dtype), device=student.device)
    raw, cap, scale = student, job.head.softcap, job.head.logit_scale / job.head.temperature
    cap = None if cap is None else cap / job.head.temperature
    if cap is not None:
        student = torch.empty_like(raw, memory_format=torch.contiguous_format)
        for target, source in ((student, raw), (teacher, teacher)):
            for rows in pieces(raw):
                target[rows] = transformed(source[rows], cap, scale).to(target.dtype)
    elif scale != 1:
        # The angle between two rows does not depend on a positive scale, and nor does its derivative by raw logits.
        angle = isinstance(job.divergence, Cosine) and scale > 0
        scale = 1.0 if angle and not job.hard else scale
        if scale != 1:
            student.mul_(scale)
        if not angle:
            teacher.mul_(scale)
    slope, both = None, _together(job, student.shape[1] == vocab)
    if both is not None:
        weights = float(job.weight_soft), float(job.weight_hard)
        found = both.with_cross_entropy(student, teacher, labels, job.ignore_index, factor, weights)
        soft, hard = found[0].sum(), found[1].sum()
    elif job.hard:
        leaf = student[:, :vocab].detach().requires_grad_(factor is not None and job.weight_hard != 0)
        with torch.enable_grad():
            loss = registry.get("cross_entropy")(leaf, labels, ignore_index=job.ignore_index, reduction="sum")
        hard = loss.detach()
        if leaf.requires_grad and factor is not None:
            (slope,) = torch.autograd.grad(loss, leaf, factor * job.weight_hard)
    if job.divergence is not None and both is None:
        wanted = None if factor is None else factor * job.weight_soft
        soft = job.divergence(student, teacher, counted, job.temperature, wanted).sum()
    if factor is None:
        return soft, hard
    if job.divergence is None:
        student.zero_()
    if slope is not None:
        student[:, :vocab] += slope
    if cap is not None:
        for rows in pieces(raw):
            raw[rows] = (student[rows].to(soft.dtype) * derivative(raw[rows], cap, scale)).to(raw.dtype)
    elif scale != 1:
        student.mul_(scale)
    return soft, hard


class Distilled(torch.autograd.Function):
    """Loss, divergence and cross-entropy; no gradient flows through the latter two."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        job: Job,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_states: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients while the logits are there."""
        tensors = (states, weight, bias, teacher_states, teacher_weight, teacher_bias, labels)
        needs: tuple[bool, ...] = ctx.needs_input_grad[1:4]
        loss, soft, hard, grads = _compute(job, tensors, needs)
        ctx.save_for_backward(*tensors)
        ctx.job, ctx.needs, ctx.owned = job, needs, grads
        ctx.mark_non_differentiable(soft, hard)
        return loss, soft, hard

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        """Scale the gradients where they lie; a second backward computes them again."""
        tensors = ctx.saved_tensors  # raises where the graph was freed
        with torch.no_grad():
            owned, ctx.owned = ctx.owned, None
            if owned is None:
                owned = _compute(ctx.job, tensors, ctx.needs)[3]
            found: tuple[Tensor | None, ...] = tuple(None if g is None else scaled(g, grads[0], g.dtype) for g in owned)
        if torch.is_grad_enabled():
            found = once(found, (grads[0], *[t for t in tensors if t is not None]))
        return None, *found, None, None, None, None


def distilled(job: Job, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, divergence and cross-entropy; of student and teacher hidden states, weight and bias, and of labels."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[:3]):
        loss, soft, hard = Distilled.apply(job, *tensors)  # type: ignore[no-untyped-call]
        return loss, soft, hard
    with torch.no_grad():
        return _compute(job, tensors, (False, False, False))[:3]


def _compute(
    job: Job, tensors: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    states, weight, bias, teacher_states, teacher_weight, teacher_bias, labels = tensors
    assert states is not None
    assert weight is not None
    assert teacher_states is not None
    assert teacher_weight is not None
    assert labels is not None
    teacher = Model(teacher_states, teacher_weight, teacher_bias)
    return compute(job, Model(states, weight, bias), teacher, labels, (needs[0], needs[1], needs[2]))
