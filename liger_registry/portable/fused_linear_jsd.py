"""``fused_linear_jsd`` slab by slab; the formula is that of ``ops.fused_linear_jsd``.

Matrix products are PyTorch's, and what happens to two slabs of logits in between is a stage, ``logit_divergence``.
Forward functions return ``(loss, student_input_slope, student_weight_slope)``: the gradients for an upstream gradient
of 1, None for those not needed. Backward multiplies them by the upstream gradient where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.kernels.compact import compact as rows_that_count
from liger_registry.kernels.linear_heuristics import stage_rows
from liger_registry.kernels.linear_products import add_product, cut_slab, logits_into, new_slab, row_slabs, scaled, wide

if TYPE_CHECKING:
    from liger_registry import Device

    Stages = Mapping[str, Callable[..., tuple[Any, ...]]]
    Results = tuple[Tensor | None, ...]


def forward_chunked(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slab_rows: int,
    sums: str,
    ignore_index: int,
    compact: str,
    reduction: str,
    accumulate: str,
    **options: Any,
) -> Results:
    """The loss and its gradients from slabs of ``slab_rows`` rows, with the head's gradient summed over them.

    ``sums`` says in which dtype: that of the ``input``, or ``float32``. In fp16 the gradients are divided by the number
    of rows at the end, since quotients of many rows would be below its smallest numbers.
    """
    students = student_input.reshape(-1, student_input.shape[-1])
    teachers = teacher_input.reshape(-1, teacher_input.shape[-1])
    rows, vocab, statistics = students.shape[0], student_weight.shape[0], wide(student_input.dtype)
    kept = None
    if labels is not None:
        labels = labels.reshape(-1)
        kept = rows_that_count(labels, ignore_index, compact, students.numel() * vocab)
    scale = _scale(labels, rows, reduction, ignore_index, students, statistics)
    late = student_input.dtype == torch.float16
    held = statistics if late or sums == "float32" else student_input.dtype
    labels = labels if kept is None or labels is None else labels[kept]
    count = rows if kept is None else kept.shape[0]

    slope = head = None
    if needs[0]:
        dtype = statistics if late else student_input.dtype
        slope = torch.empty_like(students, dtype=dtype, memory_format=torch.contiguous_format)
        if kept is not None:
            slope.zero_()
    if needs[1]:
        head = student_weight.new_empty(student_weight.shape, dtype=held)
        if count == 0:
            head.zero_()
    losses = students.new_empty(count, dtype=statistics)
    memories = [new_slab(t, min(slab_rows, count), vocab) for t in (students, teachers)]
    for here in row_slabs(count, slab_rows):
        picked = here if kept is None else kept[here]
        slabs = [cut_slab(memory, here.stop - here.start, vocab) for memory in memories]
        states = students[picked]
        logits_into(slabs[0], states, student_weight, None)
        logits_into(slabs[1], teachers[picked], teacher_weight, None)
        for part in _pieces(slabs[0]):
            loss, found = stages["divergence"](
                slabs[0][part],
                slabs[1][part],
                None if labels is None else labels[here][part],
                None if late else scale,
                ignore_index=ignore_index,
                gradient=any(needs),
                in_place=True,
                **options,
            )
            losses[here][part] = loss
            if found is not None and found.data_ptr() != slabs[0][part].data_ptr():
                slabs[0][part].copy_(found)  # a stage may work in place, it need not
        if slope is not None:
            if kept is None and slope.dtype == slabs[0].dtype:
                torch.mm(slabs[0], student_weight, out=slope[here])
            else:
                slope[picked] = torch.mm(slabs[0], student_weight).to(slope.dtype)
        if head is not None:
            add_product(head, slabs[0].t(), states, here.start == 0)
    if late:
        slope, head = (None if g is None else g.mul_(scale) for g in (slope, head))
    return (
        losses.sum() * scale,
        None if slope is None else slope.to(student_input.dtype).view(student_input.shape),
        None if head is None else head.to(student_weight.dtype),
    )


def forward_single(*tensors: Tensor, sums: str = "input", **told: Any) -> Results:
    """The loss and its gradients from one slab of all rows."""
    rows = max(tensors[0].numel() // tensors[0].shape[-1], 1)
    return forward_chunked(*tensors, slab_rows=rows, sums=sums, **told)


def backward_scale(
    grad: Tensor, *tensors: Tensor | None, device: Device, needs: tuple[bool, ...], **told: Any
) -> Results:
    """The gradients as forward left them, times the upstream gradient, in their own memory."""
    return tuple(
        scaled(slope, grad, slope.dtype) if need and slope is not None else None
        for slope, need in zip(tensors[-2:], needs, strict=True)
    )


def _scale(
    labels: Tensor | None, rows: int, reduction: str, ignore_index: int, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """The factor on the sum of all losses, 0-dim."""
    if reduction == "sum":
        return like.new_ones((), dtype=dtype)
    if labels is None:
        return like.new_full((), 1.0 / max(rows, 1), dtype=dtype)
    return torch.reciprocal((labels != ignore_index).sum().clamp_min_(1).to(dtype))


def _pieces(slab: Tensor) -> list[slice]:
    """What a stage gets at once: all rows on a GPU; on a CPU few enough for its copies to stay small."""
    if slab.is_cuda:
        return [slice(0, slab.shape[0])]
    return [*row_slabs(slab.shape[0], stage_rows(slab.shape[1], wide(slab.dtype).itemsize))]
