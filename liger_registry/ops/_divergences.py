"""What the contracts of ``jsd``, ``kl_div`` and ``tvd`` have in common: divergences of distributions over a vocabulary.

``input`` (the student, Q) and ``target`` (the teacher, P) are (..., vocab); a row is one position. Each element of a
row adds a term, in fp32 (float64 inputs: float64), and the terms are reduced:

========= =====================================================================
none      a loss for each element, of the shape of ``input``
sum       the sum
mean      the sum over the number of elements in the rows that count
batchmean the sum over the number of rows that count, whatever their dimensions
========= =====================================================================

All rows count but those whose ``shift_labels`` are ``ignore_index``: these add 0, get a gradient of 0, and what they
hold is not looked at. If none counts the loss is 0, and so are the gradients. ``target`` gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Option, Scheme, check_dtype, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]
    Terms = Callable[..., torch.Tensor]
    Formula = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor]
    Sizes = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], tuple[torch.Tensor, torch.Tensor]]

DTYPES = ("float32", "float16", "bfloat16", "float64")
REDUCTIONS = ("none", "sum", "mean", "batchmean")
# Odd sizes, the middling one first; 5000 is wider than a block of the implementations that loop.
SIZES = ((5, 41), (5, 1), (9, 3), (2, 1536), (0, 41), (2, 5000))
DIMS = {"rows": DimKind.BUCKET, "vocab": DimKind.EXACT}
ORDER = {FORWARD: ("tiles", "row", "row_chunks", "eager"), BACKWARD: ("tiles", "row", "row_chunks", "eager")}
INPUTS = (
    Input("input"),
    Input("target", differentiable=False),
    Input("shift_labels", optional=True, differentiable=False),
)
REDUCTION = Option("reduction", str, "batchmean", choices=REDUCTIONS, doc="how the terms are put together")
# Of examples' rows that do not count.
IGNORED = -100
IGNORE_INDEX = Option("ignore_index", int, IGNORED, doc="the label of rows that do not count")
#: What an exponential below the smallest normal number of fp32 may be off by, in units of fp32's epsilon: GPUs drop it.
FLUSHED = 2e-30


def check_rows(op: str, tensor: torch.Tensor, name: str) -> None:
    """Raise unless a tensor is floating and has rows of at least one element.

    Raises:
        InvalidInputError: no last dimension, or a vocabulary of zero.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise InvalidInputError(
            f"{name} of {op} has shape {tuple(tensor.shape)}",
            why="its last dimension is the vocabulary, which must be at least 1 wide",
            fix=f"pass {name} of shape (..., vocab) with vocab >= 1",
        )
    check_dtype(op, tensor, DTYPES, name)


def check_labels(op: str, labels: torch.Tensor | None, leading: Iterable[int]) -> None:
    """Raise unless labels are integers, one a row.

    Raises:
        InvalidInputError: another shape.
        UnsupportedDtypeError: a dtype other than int64 and int32.
    """
    if labels is None:
        return
    check_dtype(op, labels, ("int64", "int32"), "shift_labels")
    if labels.shape != tuple(leading):
        raise InvalidInputError(
            f"shift_labels of {op} has shape {tuple(labels.shape)}, the rows have {tuple(leading)}",
            why="each row has one label",
            fix="pass shift_labels of the leading shape of the inputs, such as labels[..., 1:].reshape(-1)",
        )


def validator(op: str) -> Callable[[Tensors, Mapping[str, Any]], None]:
    """What raises if a call of an operation contradicts its contract; sizes may be symbolic."""

    def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
        x, target, labels = inputs
        assert x is not None
        assert target is not None
        check_rows(op, x, "input")
        check_rows(op, target, "target")
        if x.shape != target.shape:
            raise InvalidInputError(
                f"target of {op} has shape {tuple(target.shape)}, input has {tuple(x.shape)}",
                why="both are distributions over one vocabulary, one a row",
                fix="pass both of one shape; expand one of them if it is shared",
            )
        check_labels(op, labels, x.shape[:-1])

    return validate


def described(inputs: Tensors, options: Mapping[str, Any], **flags: Any) -> Description:
    """The call's sizes and dtypes; of the reductions the key knows only whether there is one."""
    x, target, labels = inputs
    assert x is not None
    vocab = x.shape[-1]
    return Description(
        dims=Fields(rows=math.prod(x.shape[:-1]), vocab=vocab),
        dtypes=Fields(input=dtype_name(x), target=dtype_name(target)),
        flags=Fields(elementwise=options["reduction"] == "none", masked=labels is not None, **flags),
    )


def fixed_reduction(problem: Problem) -> str:
    """A reduction of a problem's class: of those that sum the one whose rows add up, whatever their number."""
    return "none" if problem.elementwise else "sum"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of terms and sums."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32


def forward_kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``p * (y - x)`` with p = exp(y): 0 where p is 0, whatever x is."""
    import torch

    p = y.exp()
    return p * torch.where(p == 0, 0.0, y - x)


def reduced(
    terms: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
    labels: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss of both tensors' terms in the dtype of sums, and the factor of ``scale_of``.

    Args:
        terms: of two tensors in the dtype of sums; 0 of two zeros.
        x: (..., vocab).
        target: (..., vocab).
        labels: (...), or None.
        reduction: one of ``REDUCTIONS``.
        ignore_index: the label of rows that do not count.
    """
    import torch

    dtype = torch.promote_types(wide(x.dtype), wide(target.dtype))
    x, target = x.to(dtype), target.to(dtype)
    if labels is not None:
        # Zeros instead of the rows, not of their terms: a derivative that is infinite there would give NaN times 0.
        ignored = (labels == ignore_index).unsqueeze(-1)
        x, target = torch.where(ignored, 0.0, x), torch.where(ignored, 0.0, target)
    found = terms(x, target)
    if reduction == "none":
        return found, None
    scale = scale_of(x, labels, reduction, ignore_index)
    total = found.sum()
    if scale is not None:
        return total * scale, scale
    return total * constant_factor(x.shape, reduction), None


def scale_of(x: torch.Tensor, labels: torch.Tensor | None, reduction: str, ignore_index: int) -> torch.Tensor | None:
    """The factor on the sum, 0-dim, where it depends on how many rows count; None elsewhere."""
    import torch

    if labels is None or reduction not in ("mean", "batchmean"):
        return None
    count = (labels != ignore_index).sum().clamp_min(1).to(wide(x.dtype))
    return torch.reciprocal(count * x.shape[-1] if reduction == "mean" else count)


def constant_factor(shape: torch.Size, reduction: str) -> float:
    """The factor on the sum where all rows count."""
    rows = max(math.prod(shape[:-1]), 1)
    return {"mean": 1.0 / (rows * shape[-1]), "batchmean": 1.0 / rows}.get(reduction, 1.0)


def allocator(keeps_dtype: bool) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The ``allocate`` of a scheme, for losses in the dtype of ``input`` or in that of sums."""

    def allocate(
        x: torch.Tensor, target: torch.Tensor, shift_labels: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Empty ``(loss, scale)``; a loss for each element has the strides of ``input`` where its rows are dense."""
        import torch

        sums, reduction = wide(x.dtype), options["reduction"]
        dtype = x.dtype if keeps_dtype else sums
        counted = shift_labels is not None and reduction in ("mean", "batchmean")
        scale = x.new_empty((), dtype=sums) if counted else None
        if reduction != "none":
            return x.new_empty((), dtype=dtype), scale
        layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
        return torch.empty_like(x, dtype=dtype, memory_format=layout), scale

    return allocate


def scheme(formula: Callable[..., torch.Tensor], keeps_dtype: bool) -> Scheme:
    """The one scheme: backward recomputes from the inputs, since a gradient that waits would be memory of their size.

    What it saves beside them is ``scale``, the factor on the sum, where that depends on how many rows count.
    """

    def reference(
        x: torch.Tensor, target: torch.Tensor, shift_labels: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor | None, ...]:
        scale = scale_of(x, shift_labels, options["reduction"], options["ignore_index"])
        return formula(x, target, shift_labels, **options), scale

    return Scheme(
        "default",
        saved_inputs=("input", "target", "shift_labels"),
        saved=("scale",),
        allocate=allocator(keeps_dtype),
        reference=reference,
    )


def magnitudes(
    sizes: Sizes, inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]
) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64.

    Args:
        sizes: of two tensors to the sizes of the terms that make up each element's loss, and its gradient.
        inputs: of the call.
        grad_outputs: of the call.
        options: of the call.
    """
    import torch

    (x, target, labels), (grad,) = inputs, grad_outputs
    assert x is not None
    assert target is not None
    assert grad is not None
    terms, slopes = (size.nan_to_num(0.0, 0.0, 0.0) + FLUSHED for size in sizes(x, target, options))
    if labels is not None:
        ignored = (labels == options["ignore_index"]).unsqueeze(-1)
        terms, slopes = torch.where(ignored, 0.0, terms), torch.where(ignored, 0.0, slopes)
    scale = scale_of(x, labels, options["reduction"], options["ignore_index"])
    factor: Any = constant_factor(x.shape, options["reduction"]) if scale is None else scale
    loss = terms if options["reduction"] == "none" else terms.sum() * factor
    found = {"loss": loss, "grad_input": slopes * grad.abs() * (1.0 if options["reduction"] == "none" else factor)}
    return found if scale is None else {**found, "scale": scale}


def condition(*logs: torch.Tensor) -> torch.Tensor:
    """How many roundings an exponential of these is off by: its exponent's own, and one beyond eight."""
    import torch

    size = torch.stack([log.abs().nan_to_num(0.0, 0.0, 0.0) for log in logs]).amax(0)
    return (size / 8).clamp_min(1.0)


def example(problem: Problem, device: torch.device | str, seed: int, style: str, logs: tuple[bool, bool]) -> Tensors:
    """``(input, target, shift_labels)`` for a problem, both (rows, vocab); on the meta device without values.

    Of each five rows the second has a target equal to the input, as far as its dtype goes, and the fourth does not
    count where there are labels.

    Args:
        problem: whose sizes and dtypes.
        device: where.
        seed: fixes the values.
        style: of the logits that both are softmaxes of.
        logs: whether input and target are log-probabilities.
    """
    import torch

    shape, meta = (problem.rows, problem.vocab), str(device) == "meta"
    made = []
    first = fill(shape, torch.float32, device, seed, style)
    for position, (name, log) in enumerate(zip(("input", "target"), logs, strict=True)):
        dtype = getattr(torch, str(problem.dtypes[name]))
        if meta:
            made.append(torch.empty(shape, dtype=dtype, device="meta"))
            continue
        logits = first
        if position:
            logits = fill(shape, torch.float32, device, seed + 1, "random") * 0.5 + first
            logits[1::5] = first[1::5]
        made.append((logits.log_softmax(-1) if log else logits.softmax(-1)).to(dtype))
    labels = None
    if problem.masked:
        labels = torch.zeros(problem.rows, dtype=torch.int64, device=device)
        if not meta:
            labels[3::5] = IGNORED
    return (*made, labels)


def odd(dtype: str, variants: Iterable[Mapping[str, Any]]) -> Iterable[Description]:
    """Odd sizes with labels and a reduction; at one size, every flag.

    Args:
        dtype: of both tensors.
        variants: the values of the operation's own flags.
    """
    own = [dict(variant) for variant in variants]
    dtypes = Fields(input=dtype, target=dtype)
    for rows, vocab in SIZES:
        yield Description(Fields(rows=rows, vocab=vocab), dtypes, Fields(elementwise=False, masked=True, **own[0]))
    # What changes code does so in one dtype as in another.
    for variant in own if dtype in ("bfloat16", "float64") else own[1:]:
        for elementwise, masked in ((False, True), (False, False), (True, True), (True, False)):
            if variant is own[0] or elementwise is masked:
                flags = Fields(elementwise=elementwise, masked=masked, **variant)
                yield Description(Fields(rows=5, vocab=41), dtypes, flags)
    mixed = Fields(input=dtype, target="float32" if dtype != "float32" else "bfloat16")
    yield Description(Fields(rows=5, vocab=41), mixed, Fields(elementwise=False, masked=True, **own[0]))


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows at the true width, a multiple of no tile; the width is in the code and is never changed."""
    # 2^20 elements of two tensors keep one check under 20 ms on a GPU.
    return ({"rows": max(3, min(261, (1 << 20) // problem.vocab))}, {"rows": 1})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """None: distillation is no part of what a model's own training calls. Sizes given by hand can be tuned."""
    return ()


def cut(inputs: Tensors, options: Mapping[str, Any]) -> tuple[Tensors, Mapping[str, Any]]:
    """The same call: examples have no reduction, or a sum over their rows."""
    return inputs, options


REDUCED: Mapping[str, tuple[str, ...]] = {"loss": ("rows", "vocab"), "scale": (), "grad_input": ()}
