"""``logit_divergence``: the Jensen-Shannon divergence of two slabs of logits, and its gradient. A stage of
``fused_linear_jsd``.

Each row has ``x = log_softmax(student / temperature)`` and ``y`` of the teacher, statistics in fp32 (float64 logits:
float64), and a loss, the sum of the terms of ``jsd``. With ``gradient`` there is also the derivative of the loss by the
student's logits times ``scale``, rounded once to their dtype: both in one operation, since either takes a walk over all
columns with the statistics of both known. Rows whose label is ``ignore_index`` have a loss and a gradient of 0.

With ``in_place`` the gradient may be written into the student's logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedOptionError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, dtype_name
from liger_registry.ops import _divergences as d
from liger_registry.ops.jsd import BETA, KINDS, check_beta, kind_of, sizes, terms
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.config import Scalar

    Tensors = tuple[torch.Tensor | None, ...]

TEMPERATURE = Option("temperature", float, 1.0, minimum=0.0, doc="both sets of logits are divided by it")
#: What takes the place of a temperature, which the key does not know.
SOME_TEMPERATURE = 1.5


def check_options(op: str, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedOptionError if beta is beyond 1, or the temperature 0."""
    check_beta(op, options["beta"])
    if options["temperature"] == 0:
        raise UnsupportedOptionError(
            f"option 'temperature' of {op} cannot be 0.0",
            why="logits are divided by it",
            fix="pass temperature=1.0, its default, or leave it out",
        )


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: logits that are not both (rows, vocab), labels of another shape, or a scale of any.
        UnsupportedDtypeError: a dtype that the contract does not have.
        UnsupportedOptionError: a beta beyond 1, or a temperature of 0.
    """
    student, teacher, labels, scale = inputs
    assert student is not None
    assert teacher is not None
    for name, tensor in (("student", student), ("teacher", teacher)):
        d.check_rows("logit_divergence", tensor, name)
    if student.dim() != 2 or student.shape != teacher.shape:
        raise InvalidInputError(
            f"logits of logit_divergence have shapes {tuple(student.shape)} and {tuple(teacher.shape)}",
            why="both must be (rows, vocab)",
            fix="pass logits.reshape(-1, vocab)",
        )
    d.check_labels("logit_divergence", labels, student.shape[:-1])
    if scale is not None and scale.dim() != 0:
        raise InvalidInputError("scale of logit_divergence is no number", fix="pass a tensor of no dimensions")
    check_options("logit_divergence", options)


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, which divergence it is, and what changes code."""
    student, teacher, labels, scale = inputs
    assert student is not None
    return Description(
        dims=Fields(rows=student.shape[0], vocab=student.shape[1]),
        dtypes=Fields(student=dtype_name(student), teacher=dtype_name(teacher), scale=dtype_name(scale)),
        flags=Fields(divergence=kind_of(options["beta"]), masked=labels is not None, gradient=options["gradient"]),
    )


def divergence_terms(student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """Each element's term, differentiable by the student's logits; both are in the dtype of statistics."""
    x, y = ((t / temperature).log_softmax(-1) for t in (student, teacher))
    return terms(x, y, beta)


def formula(
    student: torch.Tensor,
    teacher: torch.Tensor,
    shift_labels: torch.Tensor | None,
    scale: torch.Tensor | None,
    beta: float,
    ignore_index: int,
    temperature: float,
    gradient: bool,
    in_place: bool,
) -> Tensors:
    """``(loss, slope)``, None for a slope that is not asked for."""
    import torch

    from liger_registry.recompute import gradients

    def losses(logits: torch.Tensor) -> torch.Tensor:
        found, _ = d.reduced(
            lambda s, t: divergence_terms(s, t, beta, temperature),
            logits,
            teacher,
            shift_labels,
            "none",
            ignore_index,
        )
        return found.sum(-1)

    if not gradient:
        return losses(student), None
    ones = torch.ones(student.shape[0], dtype=d.wide(student.dtype), device=student.device)
    factors = ones if scale is None else ones * scale
    wide = student.to(ones.dtype)
    (slope,) = gradients(losses, (wide,), (factors,), (True,))
    assert slope is not None
    return losses(student).detach(), slope.to(student.dtype)


def reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    gradient: bool = False,
    in_place: bool = False,
) -> Any:  # noqa: ANN401 - a tensor, or a tuple of two
    """Those of the outputs that are asked for, in plain PyTorch.

    Args:
        student: (rows, vocab), floating.
        teacher: (rows, vocab), floating.
        shift_labels: (rows,), integers, or None.
        scale: 0-dim, a factor on the gradient, or None for 1.
        beta: the share of the teacher in the mixture, from 0 to 1.
        ignore_index: the label of rows that do not count.
        temperature: both sets of logits are divided by it.
        gradient: whether the gradient is asked for.
        in_place: whether it may be written into the student's logits.
    """
    loss, slope = formula(student, teacher, shift_labels, scale, beta, ignore_index, temperature, gradient, in_place)
    return loss if slope is None else (loss, slope)


def _scheme_reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    shift_labels: torch.Tensor | None,
    scale: torch.Tensor | None,
    **options: Any,
) -> Tensors:
    return formula(student, teacher, shift_labels, scale, **options)


def allocate(
    student: torch.Tensor,
    teacher: torch.Tensor,
    shift_labels: torch.Tensor | None,
    scale: torch.Tensor | None,
    **options: Any,
) -> Tensors:
    """Empty ``(loss, slope)``: a loss a row, and with ``gradient`` a slope of the student's shape, contiguous."""
    import torch

    loss = student.new_empty(student.shape[0], dtype=d.wide(student.dtype))
    if not options["gradient"]:
        return loss, None
    return loss, torch.empty_like(student, memory_format=torch.contiguous_format)


def slope_sizes(
    student: torch.Tensor, teacher: torch.Tensor, options: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of each element's term and of the derivative by the student's logit, float64."""
    x, y = ((t / options["temperature"]).log_softmax(-1) for t in (student, teacher))
    term, slope = (size.nan_to_num(0.0, 0.0, 0.0) for size in sizes(x, y, options))
    # A logit is off by a rounding of itself, and so is everything that its exponential is in.
    known = [t.abs().nan_to_num(0.0, 0.0, 0.0) / options["temperature"] for t in (student, teacher)]
    off = 1.0 + known[0] + known[1]
    term, slope = term * off, slope * off
    total = slope.sum(-1, keepdim=True)
    return term, (slope + x.exp() * total * off) / options["temperature"]


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64."""
    import torch

    student, teacher, labels, scale = inputs
    assert student is not None
    assert teacher is not None
    term, slope = slope_sizes(student, teacher, options)
    if scale is not None:
        slope = slope * scale
    if labels is not None:
        ignored = (labels == options["ignore_index"]).unsqueeze(-1)
        term, slope = torch.where(ignored, 0.0, term), torch.where(ignored, 0.0, slope)
    return {"loss": term.sum(-1), "slope": slope + d.FLUSHED}


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(student, teacher, shift_labels, scale)`` for a problem; in the second of five rows both are equal."""
    import torch

    shape, meta = (problem.rows, problem.vocab), str(device) == "meta"
    dtypes = [getattr(torch, str(problem.dtypes[name])) for name in ("student", "teacher")]
    first = fill(shape, torch.float32, device, seed, style, 2.0)
    second = fill(shape, torch.float32, device, seed + 1, "random")
    labels, scale = None, None
    if not meta:
        second += first
        second[1::5] = first[1::5]
    if problem.masked:
        labels = torch.zeros(problem.rows, dtype=torch.int64, device=device)
        if not meta:
            labels[3::5] = d.IGNORED
    if problem.dtypes["scale"] != "none":
        scale = torch.empty((), dtype=getattr(torch, str(problem.dtypes["scale"])), device=device)
        if not meta:
            scale.fill_(0.375)
    return first.to(dtypes[0]), second.to(dtypes[1]), labels, scale


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, and every flag at one of them."""
    scale = "float64" if dtype == "float64" else "float32"

    def described(rows: int, vocab: int, kind: str, scale: str = scale, **flags: bool) -> Description:
        marks = {"masked": True, "gradient": True} | flags
        return Description(
            Fields(rows=rows, vocab=vocab),
            Fields(student=dtype, teacher=dtype, scale=scale),
            Fields(divergence=kind, **marks),
        )

    for rows, vocab in ((5, 41), (5, 1), (9, 3), (2, 1536), (0, 41), (2, 5000)):
        yield described(rows, vocab, "mixture")
    for kind in KINDS:
        yield described(5, 41, kind, gradient=False)
        yield described(5, 41, kind, masked=False)
    yield described(5, 41, "mixture", "none")


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows of the true vocabulary, a multiple of no tile; the vocabulary is in the code and is never changed."""
    return ({"rows": max(3, min(261, (1 << 20) // problem.vocab))}, {"rows": 1})


def fixed(problem: Problem) -> Mapping[str, Scalar]:
    """Options of a problem's class."""
    return {"beta": KINDS[str(problem.divergence)], "temperature": SOME_TEMPERATURE}


OP = Op(
    name="logit_divergence",
    doc="Jensen-Shannon divergence of rows of logits, and its gradient.",
    inputs=(
        Input("student", differentiable=False),
        Input("teacher", differentiable=False),
        Input("shift_labels", optional=True, differentiable=False),
        Input("scale", optional=True, differentiable=False),
    ),
    options=(
        BETA,
        d.IGNORE_INDEX,
        TEMPERATURE,
        Option("gradient", bool, False, doc="whether the gradient is asked for"),
        Option("in_place", bool, False, doc="whether the gradient may be written into the student's logits"),
    ),
    outputs=("loss", "slope"),
    schemes=(Scheme("default", (), (), allocate, _scheme_reference, backward=lambda *tensors, **options: ()),),
    dims={"rows": DimKind.BUCKET, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={"loss": ("vocab",), "slope": ("vocab",)},
    example=example,
    proxies=proxies,
    calls=d.calls,
    order={FORWARD: ("row", "column_split", "eager"), BACKWARD: ()},
    odd=odd,
    asked={"slope": "gradient"},
    constant=frozenset({"loss", "slope"}),
    fixed=fixed,
    compiled=lambda options: {**options, "in_place": False},
    private=True,
)
