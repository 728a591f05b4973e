"""``fused_linear_jsd``: the Jensen-Shannon divergence of a student's and a teacher's head, without their logits.

``student_input`` is (..., hidden), ``student_weight`` (vocab, hidden); the teacher's may have another width. Logits are
what both heads give in the dtype of their inputs, ``x = log_softmax(student logits / temperature)`` and ``y`` of the
teacher in fp32 (float64: float64), and each row adds the sum of the terms of ``jsd``. The loss is that sum over the
number of rows that count (``batchmean``), or itself (``sum``), in fp32 (float64: float64). Rows whose ``shift_labels``
are ``ignore_index`` do not count; if none does, loss and gradients are 0.

Gradients go to the student's input and weight alone, and are computed in the forward, slab by slab: three products, and
one for the teacher. By default a slab has no fewer than 2,048 rows and no less than a quarter of all, so that the
head's gradient is rounded at most four times; a smaller memory budget sums it in fp32, or with
``accumulate="input"`` in its own dtype. liger-kernel 0.8.5 asks its products for fp32 logits; here they are rounded as
the models' own heads do it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.examples import fill
from liger_registry.kernels.fused_linear_jsd_heuristics import default_budget
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, dtype_name
from liger_registry.ops import _divergences as d
from liger_registry.ops._linear import COMPACT, FINE_GRID, GRID
from liger_registry.ops.jsd import BETA, KINDS, kind_of
from liger_registry.ops.logit_divergence import (
    SOME_TEMPERATURE,
    TEMPERATURE,
    check_options,
    divergence_terms,
    slope_sizes,
)
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.recompute import gradients

if TYPE_CHECKING:
    import torch

    from liger_registry.config import Scalar

    Tensors = tuple[torch.Tensor | None, ...]

ACCUMULATE = ("auto", "float32", "input")
# (tokens, vocab, hidden, teacher_hidden), the middling one first.
_SIZES = ((5, 41, 24, 16), (37, 3, 8, 9), (3, 1, 1, 1), (0, 41, 8, 8), (1, 41, 8, 3), (261, 130, 16, 8))


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: shapes that do not fit, or an empty vocabulary or width.
        UnsupportedDtypeError: a dtype that the contract does not have, or two within one model.
        UnsupportedOptionError: a beta beyond 1, or a temperature of 0.
    """
    labels = inputs[4]
    for number, name in ((0, "student"), (2, "teacher")):
        states, weight = inputs[number : number + 2]
        assert states is not None
        assert weight is not None
        d.check_rows("fused_linear_jsd", states, f"{name}_input")
        if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != states.shape[-1]:
            raise InvalidInputError(
                f"{name}_weight of fused_linear_jsd has shape {tuple(weight.shape)}, {name}_input has "
                f"{tuple(states.shape)}",
                why=f"the weight must have shape (vocab, {states.shape[-1]})",
                fix="pass the weight of the output head, as of torch.nn.Linear",
            )
        if weight.dtype != states.dtype:
            raise UnsupportedDtypeError(
                f"{name}_input and {name}_weight of fused_linear_jsd are {dtype_name(states)} and {dtype_name(weight)}",
                fix="cast them to one dtype, or call it under torch.autocast",
            )
    student, student_weight, teacher, teacher_weight = inputs[:4]
    assert student is not None
    assert teacher is not None
    assert student_weight is not None
    assert teacher_weight is not None
    if student.shape[:-1] != teacher.shape[:-1] or student_weight.shape[0] != teacher_weight.shape[0]:
        raise InvalidInputError(
            f"student and teacher of fused_linear_jsd have rows {tuple(student.shape[:-1])} and "
            f"{tuple(teacher.shape[:-1])}, vocabularies {student_weight.shape[0]} and {teacher_weight.shape[0]}",
            why="their distributions are compared row by row, over one vocabulary",
            fix="pass the same positions of both, and weights of one vocabulary",
        )
    d.check_labels("fused_linear_jsd", labels, student.shape[:-1])
    check_options("fused_linear_jsd", options)


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, which divergence it is, and what changes code."""
    student, weight, teacher, _, labels = inputs
    assert student is not None
    assert weight is not None
    assert teacher is not None
    return Description(
        dims=Fields(
            tokens=math.prod(student.shape[:-1]),
            hidden=student.shape[-1],
            teacher_hidden=teacher.shape[-1],
            vocab=weight.shape[0],
        ),
        dtypes=Fields(student_input=dtype_name(student), teacher_input=dtype_name(teacher)),
        flags=Fields(
            divergence=kind_of(options["beta"]),
            masked=labels is not None,
            accumulate=options["accumulate"],
        ),
    )


def reference(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    accumulate: str = "auto",
    compact: str = "auto",
) -> torch.Tensor:
    """The loss in plain, differentiable PyTorch, in fp32 or float64.

    Args:
        student_input: (..., hidden).
        student_weight: (vocab, hidden), of its dtype.
        teacher_input: (..., teacher_hidden).
        teacher_weight: (vocab, teacher_hidden), of its dtype.
        shift_labels: (...), integers; where they are ``ignore_index`` the row does not count.
        beta: the share of the teacher in the mixture, from 0 to 1.
        ignore_index: the label of rows that do not count.
        temperature: both sets of logits are divided by it.
        reduction: ``batchmean`` or ``sum``.
        accumulate: in which dtype the head's gradient is summed over slabs.
        compact: whether rows that do not count are left out of the products.
    """
    from torch.nn.functional import linear

    student, teacher = linear(student_input, student_weight), linear(teacher_input, teacher_weight.detach())
    loss, _ = d.reduced(
        lambda s, t: divergence_terms(s, t, beta, temperature),
        student,
        teacher.detach(),
        shift_labels,
        reduction,
        ignore_index,
    )
    return loss.to(d.wide(student_input.dtype))


def allocate(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    *others: torch.Tensor | None,
    needs: tuple[bool, ...],
    **options: Any,
) -> Tensors:
    """Empty ``(loss, student_input_slope, student_weight_slope)``; slopes are contiguous, None if not needed."""
    import torch

    loss = student_input.new_empty((), dtype=d.wide(student_input.dtype))
    slopes = (
        torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
        for t, need in zip((student_input, student_weight), needs, strict=True)
    )
    return loss, *slopes


def scheme_reference(*inputs: torch.Tensor | None, needs: tuple[bool, ...], **options: Any) -> Tensors:
    """``(loss, student_input_slope, student_weight_slope)`` in plain PyTorch."""
    loss = reference(*inputs, **options).detach()  # type: ignore[arg-type]
    ones = (loss.new_ones(()),)
    found = gradients(lambda *xs: reference(*xs, **options), inputs, ones, (*needs, False, False, False))
    return loss, *(None if g is None else g.contiguous() for g in found[:2])


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64: random errors add as the root of the sum of squares."""
    import torch
    from torch.nn.functional import linear

    states, weight, teacher, teacher_weight, labels = inputs
    (grad,) = grad_outputs
    assert states is not None
    assert weight is not None
    assert teacher is not None
    assert teacher_weight is not None
    assert grad is not None
    rows = states.reshape(-1, states.shape[-1])
    logits = linear(rows, weight), linear(teacher.reshape(-1, teacher.shape[-1]), teacher_weight)
    term, slope = slope_sizes(*logits, options)
    scale: Any = d.scale_of(rows, labels, options["reduction"], options["ignore_index"])
    if scale is None:
        scale = d.constant_factor(rows.shape, options["reduction"])
    if labels is not None:
        ignored = (labels.reshape(-1) == options["ignore_index"]).unsqueeze(-1)
        term, slope = torch.where(ignored, 0.0, term), torch.where(ignored, 0.0, slope)
    slope = slope * scale
    of_states = (slope.square() @ weight.square()).sqrt().view(states.shape) + d.FLUSHED
    of_weight = (slope.square().t() @ rows.square()).sqrt() + d.FLUSHED
    return {
        "loss": term.sum() * scale,
        "student_input_slope": of_states,
        "student_weight_slope": of_weight,
        "grad_student_input": of_states * grad.abs(),
        "grad_student_weight": of_weight * grad.abs(),
    }


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """The inputs for a problem, on the meta device without values; with labels every fifth row does not count.

    They lie on grids so coarse that products in fp32 are exact in any order, so that logits are rounded alike by every
    implementation: what differs is then a fault. Those of style ``random`` have weights, and those of ``zeros`` states,
    that a cast to bf16 would change, where they are of more bits.
    """
    import torch

    tokens, vocab = int(problem.tokens), int(problem.vocab)
    made: list[torch.Tensor | None] = []
    for number, (name, width) in enumerate((("student", problem.hidden), ("teacher", problem.teacher_hidden))):
        size = 2.0 ** -max(0, (int(width).bit_length() - 3) // 2)
        kinds = (((tokens, int(width)), style, 1.0, "zeros"), ((vocab, int(width)), "random", size, "random"))
        dtype = getattr(torch, str(problem.dtypes[f"{name}_input"]))
        for part, (shape, kind, factor, fine) in enumerate(kinds):
            values = fill(shape, torch.float32, device, seed + 2 * number + part, kind)
            grid = FINE_GRID if dtype.itemsize > 2 and style == fine else GRID
            values = values if values.is_meta else (values * grid).round_().mul_(factor / grid)
            made.append(values.to(dtype))
    if problem.masked:
        labels = torch.zeros(tokens, dtype=torch.int64, device=device)
        if not labels.is_meta:
            labels[3::5] = d.IGNORED
        made.append(labels)
    else:
        made.append(None)
    return tuple(made)


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, and every flag at one of them."""

    def described(sizes: tuple[int, int, int, int], teacher: str = dtype, **flags: Any) -> Description:
        marks: dict[str, Any] = {"divergence": "mixture", "masked": True, "accumulate": "auto", **flags}
        tokens, vocab, hidden, teacher_hidden = sizes
        dims = Fields(tokens=tokens, vocab=vocab, hidden=hidden, teacher_hidden=teacher_hidden)
        return Description(dims, Fields(student_input=dtype, teacher_input=teacher), Fields(marks))

    for sizes in _SIZES:
        yield described(sizes)
    small = (7, 41, 8, 16)
    for kind in KINDS:
        yield described(small, divergence=kind, masked=kind == "reverse")
    for accumulate in ACCUMULATE[1:]:
        yield described((261, 41, 8, 16), accumulate=accumulate)
    yield described(small, "float32" if dtype != "float32" else "bfloat16")


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Slabs as many rows high as the problem's, of narrow heads: products are not ours, and the stage has its own."""
    few = {"vocab": 29, "hidden": 5, "teacher_hidden": 3}
    return (
        {"tokens": max(4101, int(problem.tokens) // 2 + 5), **few},
        {"tokens": 37, "vocab": 67, "hidden": 16, "teacher_hidden": 9},
        {"tokens": 1, **few},
    )


def fixed(problem: Problem) -> Mapping[str, Scalar]:
    """Options of a problem's class."""
    return {"beta": KINDS[str(problem.divergence)], "temperature": SOME_TEMPERATURE, "reduction": "sum"}


OP = Op(
    name="fused_linear_jsd",
    doc="Jensen-Shannon divergence of two linear heads, without their logits.",
    inputs=(
        Input("student_input"),
        Input("student_weight"),
        Input("teacher_input", differentiable=False),
        Input("teacher_weight", differentiable=False),
        Input("shift_labels", optional=True, differentiable=False),
    ),
    options=(
        BETA,
        d.IGNORE_INDEX,
        TEMPERATURE,
        Option("reduction", str, "batchmean", choices=("batchmean", "sum"), doc="what becomes of the rows' sums"),
        Option("accumulate", str, "auto", choices=ACCUMULATE, doc="the dtype in which the head's gradient is summed"),
        Option("compact", str, "auto", choices=COMPACT, doc="whether rows that do not count are left out"),
    ),
    outputs=("loss",),
    schemes=(
        Scheme(
            "grad_in_forward",
            saved_inputs=("student_input", "student_weight", "teacher_input", "teacher_weight", "shift_labels"),
            saved=("student_input_slope", "student_weight_slope"),
            allocate=allocate,
            reference=scheme_reference,
            gradients=True,
            owned=("student_input_slope", "student_weight_slope"),
        ),
    ),
    dims={
        "tokens": DimKind.BUCKET,
        "hidden": DimKind.EXACT,
        "teacher_hidden": DimKind.EXACT,
        "vocab": DimKind.EXACT,
    },
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={
        "loss": ("tokens", "vocab"),
        "student_input_slope": ("vocab",),
        "grad_student_input": ("vocab",),
        "student_weight_slope": ("tokens",),
        "grad_student_weight": ("tokens",),
    },
    example=example,
    proxies=proxies,
    calls=d.calls,
    order={FORWARD: ("chunked", "single"), BACKWARD: ("scale",)},
    budget=default_budget,
    odd=odd,
    fixed=fixed,
    cut=d.cut,
    autocast=("student_input", "student_weight", "teacher_input", "teacher_weight"),
    compiled=lambda options: {**options, "compact": "off"} if options["compact"] == "auto" else options,
)
