"""``logit_cosine``: the angle between rows of two slabs of logits, a cross-entropy of the first, and their gradient. A
stage of the cosine distillation.

A row of student's logits s and teacher's t has a distance ``1 - s . t / (|s| |t|)``, in fp32 (float64 logits: float64).
A row shorter than ``SHORTEST`` has no direction: its cosine is 0, and there is no gradient. Lengths beyond 1e19, whose
squares fp32 does not hold, give no meaningful numbers. With ``cross_entropy`` the row also has the negative
log-probability of its label under the student; of a label that is no class it is NaN, and so is the gradient.

With ``gradient`` there is the derivative of ``soft * distance + hard * nll`` by the student's logits times ``scale``,
rounded once to their dtype: of both in one operation, since it takes the same walk over all columns. Rows whose label
is ``ignore_index`` have 0 everywhere, whatever they hold. In all others an infinity or NaN of either row gives NaN.

With ``in_place`` the gradient may be written into the student's logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.kernels.logit_cosine_heuristics import SHORTEST
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, dtype_name
from liger_registry.ops import _divergences as d
from liger_registry.ops._logits import exponent, is_target, softplus, split_softmax, targets
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.config import Scalar

    Tensors = tuple[torch.Tensor | None, ...]

#: What takes the place of both weights, which the key does not know.
SOFT, HARD = 0.75, 1.5


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: logits that are not both (rows, vocab), labels of another shape, none for a cross-entropy, or
            a scale that is no number.
        UnsupportedDtypeError: a dtype that the contract does not have.
    """
    student, teacher, labels, scale = inputs
    assert student is not None
    assert teacher is not None
    for name, tensor in (("student", student), ("teacher", teacher)):
        d.check_rows("logit_cosine", tensor, name)
    if student.dim() != 2 or student.shape != teacher.shape:
        raise InvalidInputError(
            f"logits of logit_cosine have shapes {tuple(student.shape)} and {tuple(teacher.shape)}",
            why="both must be (rows, vocab)",
            fix="pass logits.reshape(-1, vocab)",
        )
    d.check_labels("logit_cosine", labels, student.shape[:-1])
    if labels is None and options["cross_entropy"]:
        raise InvalidInputError("shift_labels of logit_cosine are missing", why="a cross-entropy is asked for")
    if scale is not None and scale.dim() != 0:
        raise InvalidInputError("scale of logit_cosine is no number", fix="pass a tensor of no dimensions")


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and what changes code."""
    student, teacher, labels, scale = inputs
    assert student is not None
    return Description(
        dims=Fields(rows=student.shape[0], vocab=student.shape[1]),
        dtypes=Fields(student=dtype_name(student), teacher=dtype_name(teacher), scale=dtype_name(scale)),
        flags=Fields(cross_entropy=options["cross_entropy"], masked=labels is not None, gradient=options["gradient"]),
    )


def distances(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``1 - cos`` of each row, differentiable by the student's logits; both are in the dtype of statistics.

    As ``|u - v|^2 / 2`` of the unit vectors: of near rows ``1 - u . v`` keeps no digits, in float64 neither.
    """
    import torch

    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (student, teacher)]
    nothing = (lengths[0] < SHORTEST) | (lengths[1] < SHORTEST)
    u, v = (t / length.masked_fill(nothing, 1.0) for t, length in zip((student, teacher), lengths, strict=True))
    half = (u - v).square().sum(-1) / 2
    none = (half - half).detach()  # 0, or NaN where either row has one, and then all of the gradient is
    distance: torch.Tensor = torch.where(nothing.squeeze(-1), 1.0, half) + none * u.sum(-1)
    return distance


def likelihoods(student: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The negative log-probability of each row's label, differentiable; NaN of a label that is no class."""
    import torch

    log_rest, target_logit, there = split_softmax(student, labels.long())
    return softplus(log_rest - target_logit) * torch.where(there, 1.0, torch.nan)


def formula(
    student: torch.Tensor,
    teacher: torch.Tensor,
    shift_labels: torch.Tensor | None,
    scale: torch.Tensor | None,
    soft: float,
    hard: float,
    cross_entropy: bool,
    ignore_index: int,
    gradient: bool,
    in_place: bool,
) -> Tensors:
    """``(distance, nll, slope)``, None for what is not asked for."""
    import torch

    from liger_registry.recompute import gradients

    ignored = None if shift_labels is None else shift_labels == ignore_index
    dtype = torch.promote_types(d.wide(student.dtype), d.wide(teacher.dtype))
    wide, other = student.to(dtype), teacher.to(dtype)
    if ignored is not None:
        # Zeros instead of the rows, not of their losses: a derivative that is no number would stay NaN times 0.
        other = torch.where(ignored[:, None], 0.0, other)

    def losses(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if ignored is not None:
            logits = torch.where(ignored[:, None], 0.0, logits)
        found = [distances(logits, other)]
        if cross_entropy:
            assert shift_labels is not None
            assert ignored is not None
            found.append(likelihoods(logits, torch.where(ignored, 0, shift_labels)))
        if ignored is not None:
            found = [torch.where(ignored, 0.0, loss) for loss in found]
        return tuple(found)

    distance, *nll = (loss.detach().to(d.wide(student.dtype)) for loss in losses(wide))
    slope = None
    if gradient:
        ones = torch.ones(student.shape[0], dtype=dtype, device=student.device)
        factors = [ones * weight if scale is None else ones * weight * scale for weight in (soft, hard)]
        (found,) = gradients(losses, (wide,), factors[: 1 + cross_entropy], (True,))
        assert found is not None
        slope = found.to(student.dtype)
    return distance, nll[0] if cross_entropy else None, slope


def reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    soft: float = 1.0,
    hard: float = 1.0,
    cross_entropy: bool = False,
    ignore_index: int = -100,
    gradient: bool = False,
    in_place: bool = False,
) -> Any:  # noqa: ANN401 - a tensor, or a tuple of several
    """Those of the outputs that are asked for, in plain PyTorch.

    Args:
        student: (rows, vocab), floating.
        teacher: (rows, vocab), floating.
        shift_labels: (rows,), integers, or None.
        scale: 0-dim, a factor on the gradient, or None for 1.
        soft: the distance's weight in the gradient.
        hard: that of the cross-entropy.
        cross_entropy: whether it is asked for, and part of the gradient.
        ignore_index: the label of rows that do not count.
        gradient: whether the gradient is asked for.
        in_place: whether it may be written into the student's logits.
    """
    options = (soft, hard, cross_entropy, ignore_index, gradient, in_place)
    found = tuple(y for y in formula(student, teacher, shift_labels, scale, *options) if y is not None)
    return found[0] if len(found) == 1 else found


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
    """Empty ``(distance, nll, slope)``: numbers of rows, and a slope of the student's shape, contiguous."""
    import torch

    def row(asked: bool = True) -> torch.Tensor | None:
        return student.new_empty(student.shape[0], dtype=d.wide(student.dtype)) if asked else None

    slope = torch.empty_like(student, memory_format=torch.contiguous_format) if options["gradient"] else None
    return row(), row(options["cross_entropy"]), slope


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64."""
    import torch

    student, teacher, labels, scale = inputs
    assert student is not None
    assert teacher is not None
    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (student, teacher)]
    nothing = (lengths[0] < SHORTEST) | (lengths[1] < SHORTEST)
    u, v = ((t / length.masked_fill(nothing, 1.0)).abs() for t, length in zip((student, teacher), lengths, strict=True))
    # The products of a row's sum are no more than both lengths' own. Its error is in all of the student's column.
    slope = torch.where(nothing, 0.0, (v + 2.0 * u) / lengths[0]) * abs(options["soft"])
    sizes = {"distance": torch.ones_like(lengths[0][:, 0])}
    if options["cross_entropy"]:
        assert labels is not None
        log_rest, target_logit, there = split_softmax(student, labels.long())
        gap = log_rest - target_logit
        # Below the normal numbers of fp32 an exponential has no digits.
        p = torch.softmax(student, -1) + d.FLUSHED
        logs = 1.0 + log_rest.nan_to_num(0.0, 0.0, 0.0).abs() + target_logit.abs() + (p * student.abs()).sum(-1)
        share = torch.sigmoid(gap)
        sizes["nll"] = torch.where(there, torch.nn.functional.softplus(gap) + share * logs, 0.0)
        own = (share * (1.0 + logs / 8))[:, None]
        _, _, mask = is_target(labels.long(), student.shape[1])
        both = torch.logaddexp(log_rest, target_logit)
        slope = slope + torch.where(mask, own, p * exponent(student, both)) * abs(options["hard"])
    if scale is not None:
        slope = slope * scale.abs()
    sizes["slope"] = slope + d.FLUSHED
    if labels is not None:
        ignored = labels == options["ignore_index"]
        sizes = {
            name: torch.where(ignored if size.dim() == 1 else ignored[:, None], 0.0, size)
            for name, size in sizes.items()
        }
    return sizes


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(student, teacher, shift_labels, scale)`` for a problem; in the second of five rows both are equal, and of the
    fourth the label says that it does not count. With ``zeros`` the teacher has rows of them, too."""
    import torch

    shape, meta = (problem.rows, problem.vocab), str(device) == "meta"
    dtypes = [getattr(torch, str(problem.dtypes[name])) for name in ("student", "teacher")]
    first = fill(shape, torch.float32, device, seed, style, 2.0)
    second = fill(shape, torch.float32, device, seed + 1, "random")
    if not meta:
        second += first
        second[1::5] = first[1::5]
        if style == "zeros":
            second[3::7] = 0
    labels, scale = None, None
    if problem.masked:
        labels = targets(problem.rows, problem.vocab, device, seed, (d.IGNORED,))
    if problem.dtypes["scale"] != "none":
        scale = torch.empty((), dtype=getattr(torch, str(problem.dtypes["scale"])), device=device)
        if not meta:
            scale.fill_(0.375)
    return first.to(dtypes[0]), second.to(dtypes[1]), labels, scale


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, and every flag at one of them."""
    scale = "float64" if dtype == "float64" else "float32"

    def described(rows: int, vocab: int, scale: str = scale, teacher: str = dtype, **flags: bool) -> Description:
        marks = {"cross_entropy": True, "masked": True, "gradient": True} | flags
        return Description(
            Fields(rows=rows, vocab=vocab), Fields(student=dtype, teacher=teacher, scale=scale), Fields(marks)
        )

    for rows, vocab in ((5, 41), (5, 1), (9, 3), (2, 1536), (0, 41), (2, 5000)):
        yield described(rows, vocab)
    for gradient in (True, False):
        yield described(5, 41, cross_entropy=False, gradient=gradient)
        yield described(5, 41, cross_entropy=False, masked=False, gradient=gradient)
    yield described(5, 41, gradient=False)
    yield described(5, 41, "none")
    yield described(5, 41, teacher="float32" if dtype != "float32" else "bfloat16")


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows of the true vocabulary, a multiple of no tile; the vocabulary is in the code and is never changed."""
    return ({"rows": max(3, min(261, (1 << 20) // problem.vocab))}, {"rows": 1})


def fixed(problem: Problem) -> Mapping[str, Scalar]:
    """Weights that are neither their defaults nor alike."""
    return {"soft": SOFT, "hard": HARD}


OP = Op(
    name="logit_cosine",
    doc="Cosine distance of rows of logits, with a cross-entropy, and their gradient.",
    inputs=(
        Input("student", differentiable=False),
        Input("teacher", differentiable=False),
        Input("shift_labels", optional=True, differentiable=False),
        Input("scale", optional=True, differentiable=False),
    ),
    options=(
        Option("soft", float, 1.0, doc="the distance's weight in the gradient"),
        Option("hard", float, 1.0, doc="the cross-entropy's weight in the gradient"),
        Option("cross_entropy", bool, False, doc="whether a cross-entropy of the student is asked for"),
        d.IGNORE_INDEX,
        Option("gradient", bool, False, doc="whether the gradient is asked for"),
        Option("in_place", bool, False, doc="whether the gradient may be written into the student's logits"),
    ),
    outputs=("distance", "nll", "slope"),
    schemes=(Scheme("default", (), (), allocate, _scheme_reference, backward=lambda *tensors, **options: ()),),
    dims={"rows": DimKind.BUCKET, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={name: ("vocab",) for name in ("distance", "nll", "slope")},
    example=example,
    proxies=proxies,
    calls=d.calls,
    order={FORWARD: ("row", "column_split", "eager"), BACKWARD: ()},
    odd=odd,
    asked={"nll": "cross_entropy", "slope": "gradient"},
    constant=frozenset({"distance", "nll", "slope"}),
    fixed=fixed,
    compiled=lambda options: {**options, "in_place": False},
    private=True,
)
