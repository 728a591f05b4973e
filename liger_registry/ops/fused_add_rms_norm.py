"""``fused_add_rms_norm``: a residual addition and the ``rms_norm`` behind it in one pass.

``new_residual = round(x + residual)`` and ``y = rms_norm(new_residual, weight)``, with the roundings of decoder layers,
which add first (``hidden = residual + hidden``) and normalise the rounded sum. Castings, offset and the dtype of ``y``
are those of ``rms_norm`` (see ``ops/rms_norm.py``) for ``new_residual`` in place of x. x and residual have one dtype,
and ``new_residual`` has it too: where a model adds bf16 to fp32, as under autocast, the caller casts x first, which is
what PyTorch's promotion does.

Backward has the gradients of both outputs. Those of x and residual are the same numbers,
``rms_norm_backward(dy) + dnew_residual``, rounded once, and launch functions return one tensor for both. Backward of
PyTorch's own ``x + residual`` does the same: the engine adds into a gradient in place, or keeps it as a leaf's
``.grad``, only if nothing else holds that tensor, and copies it otherwise. A library operator may not return one tensor
twice: compiled code would write into both at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.ops import rms_norm
from liger_registry.ops.rms_norm import CASTINGS, DTYPES
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.recompute import gradients

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: no last dimension, a width of zero, a weight of another width, or a residual of another
            shape: nothing is broadcast.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64, or x and residual of two.
    """
    x, residual, weight = inputs
    assert x is not None
    assert residual is not None
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InvalidInputError(
            f"x of fused_add_rms_norm has shape {tuple(x.shape)}",
            why="it normalises the last dimension, which must be at least 1 wide",
            fix="pass x of shape (..., hidden) with hidden >= 1",
        )
    check_dtype("fused_add_rms_norm", x, DTYPES, "x")
    check_dtype("fused_add_rms_norm", residual, DTYPES, "residual")
    if residual.shape != x.shape:
        raise InvalidInputError(
            f"residual of fused_add_rms_norm has shape {tuple(residual.shape)}, x has {tuple(x.shape)}",
            why="the sum broadcasts nothing",
            fix="pass tensors of one shape, for example residual.expand_as(x)",
        )
    if residual.dtype != x.dtype:
        raise UnsupportedDtypeError(
            f"x of fused_add_rms_norm is {dtype_name(x)}, residual is {dtype_name(residual)}",
            why="both have the dtype in which the residual stream is kept",
            fix="cast as PyTorch's promotion does, for example x.to(residual.dtype)",
        )
    if weight is not None:
        check_dtype("fused_add_rms_norm", weight, DTYPES, "weight")
        if weight.shape != x.shape[-1:]:
            raise InvalidInputError(
                f"weight of fused_add_rms_norm has shape {tuple(weight.shape)}, x has {tuple(x.shape)}",
                why=f"the weight must have shape ({x.shape[-1]},)",
                fix="pass the weight of this layer, or None",
            )


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes."""
    x, residual, weight = inputs
    assert x is not None
    hidden = x.shape[-1]
    return Description(
        dims=Fields(rows=x.numel() // hidden, hidden=hidden),
        dtypes=Fields(x=dtype_name(x), residual=dtype_name(residual), weight=dtype_name(weight)),
        flags=Fields(casting=options["casting"]),
    )


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, new_residual)`` in plain, differentiable PyTorch.

    Args:
        x: (..., hidden), floating.
        residual: of the shape and dtype of x.
        weight: (hidden,), or None.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting: the model family whose roundings apply.
    """
    new_residual = x + residual
    return rms_norm.formula(new_residual, weight, eps, offset, casting)[0], new_residual


def _scheme_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    new_residual = x + residual
    y, rstd = rms_norm.formula(new_residual, weight, **options)
    return y, new_residual, rstd


def backward(
    dy: torch.Tensor,
    dnew_residual: torch.Tensor,
    weight: torch.Tensor | None,
    new_residual: torch.Tensor,
    rstd: torch.Tensor,
    *,
    needs: Sequence[bool],
    **options: Any,
) -> Tensors:
    """Gradients of ``(x, residual, weight)`` in plain PyTorch; the first two are one tensor."""

    def outputs(total: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm.formula(total, weight, **options)[0], total.view_as(total)

    wanted = (needs[0] or needs[1], needs[2])
    total, grad_weight = gradients(outputs, (new_residual, weight), (dy, dnew_residual), wanted)
    return total if needs[0] else None, total if needs[1] else None, grad_weight


def allocate(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Empty ``(y, new_residual, rstd)``: the outputs have the strides of x where its last dimension is contiguous."""
    y, rstd = rms_norm.allocate(x, weight, **options)
    return y, rms_norm.allocate(x, None, **options)[0], rstd


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64."""
    x, residual, weight = inputs
    dy, dnew_residual = grad_outputs
    assert x is not None
    assert residual is not None
    assert dnew_residual is not None
    total = x + residual
    sizes = dict(rms_norm.magnitude((total, weight), (dy,), options))
    gradient = sizes.pop("grad_x") + dnew_residual.abs()
    return {**sizes, "new_residual": total.abs(), "grad_x": gradient, "grad_residual": gradient}


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(x, residual, weight)`` for a problem, x of shape (rows, hidden); on the meta device without values."""
    import torch

    x, weight = rms_norm.example(problem, device, seed, style)
    dtype = getattr(torch, str(problem.dtypes["residual"]))
    return x, fill((problem.rows, problem.hidden), dtype, device, seed + 2, style), weight


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes with all of it, then each casting, no weight, and a weight of another dtype."""

    def described(rows: int, hidden: int, weight: str = dtype, casting: str = "llama") -> Description:
        return Description(
            Fields(rows=rows, hidden=hidden), Fields(x=dtype, residual=dtype, weight=weight), Fields(casting=casting)
        )

    sizes = [(5, 41), (5, 3), (5, 1536)]
    for rows, hidden in (*sizes, (5, 1), (0, 41), (1, 41), (37, 41)) if dtype == "bfloat16" else sizes:
        yield described(rows, hidden)
    yield described(5, 41, "none")
    for casting in CASTINGS[1:]:
        yield described(5, 41, casting=casting)
    if dtype == "bfloat16":
        yield described(5, 41, "float32")
        yield described(5, 41, "float32", "none")


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The additions behind attention and behind the MLP, each with the norm that follows."""
    if architecture.norm == "rms_norm":
        yield Description(
            Fields(rows=tokens, hidden=architecture.hidden),
            Fields(x=dtype, residual=dtype, weight=dtype),
            Fields(casting=architecture.norm_casting),
        )


OP = Op(
    name="fused_add_rms_norm",
    doc="A residual addition and the root-mean-square normalisation of the sum: (y, new_residual).",
    inputs=(Input("x"), Input("residual"), Input("weight", optional=True)),
    options=(
        Option("eps", float, 1e-6, minimum=0.0, doc="added to the mean of squares"),
        Option("offset", float, 0.0, doc="added to the weight; 1 for Gemma"),
        Option("casting", str, "llama", choices=CASTINGS, doc="the model family whose roundings apply"),
    ),
    outputs=("y", "new_residual"),
    schemes=(
        Scheme(
            "default",
            ("weight",),
            ("rstd",),
            allocate,
            _scheme_reference,
            backward=backward,
            saved_outputs=("new_residual",),
        ),
    ),
    dims={"rows": DimKind.BUCKET, "hidden": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={
        "y": ("hidden",),
        "new_residual": (),
        "rstd": ("hidden",),
        "grad_x": ("hidden",),
        "grad_residual": ("hidden",),
        "grad_weight": ("rows",),
    },
    example=example,
    proxies=rms_norm.proxies,
    calls=calls,
    odd=odd,
    order={
        FORWARD: ("multi_row", "row", "column_split", "row_chunks", "functional", "eager"),
        BACKWARD: ("persistent", "column_split", "row_chunks", "eager", "functional"),
    },
)
