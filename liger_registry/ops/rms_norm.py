"""``rms_norm``: root-mean-square normalisation (Zhang and Sennrich, 2019) with the roundings of the model families.

``y = x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension. The families differ in where they round:

====== ================================================================ =====================
casting formula                                                          dtype of ``y``
====== ================================================================ =====================
llama   ``round(x32 * rstd) * (offset + weight)`` in the weight's dtype   promoted from x, weight
gemma   ``round(x32 * rstd * (offset + weight32))``                       that of ``x``
none    ``round(x32 * rstd * (offset + weight32))``, offset in fp32       that of ``x``
====== ================================================================ =====================

``gemma`` and ``none`` round alike in the forward; ``gemma`` differs by its reference's backward, which rounds nothing
before the sum, and by the offset of 1 its models are called with. Statistics are in fp32 (float64 inputs: float64).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

DTYPES = ("float32", "float16", "bfloat16", "float64")
CASTINGS = ("llama", "gemma", "none")


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: no last dimension, a width of zero, or a weight of another width.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    x, weight = inputs
    assert x is not None
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InvalidInputError(
            f"x of rms_norm has shape {tuple(x.shape)}",
            why="it normalises the last dimension, which must be at least 1 wide",
            fix="pass x of shape (..., hidden) with hidden >= 1",
        )
    hidden = x.shape[-1]
    check_dtype("rms_norm", x, DTYPES, "x")
    if weight is not None:
        check_dtype("rms_norm", weight, DTYPES, "weight")
        if weight.shape != (hidden,):
            raise InvalidInputError(
                f"weight of rms_norm has shape {tuple(weight.shape)}, x has {tuple(x.shape)}",
                why=f"the weight must have shape ({hidden},)",
                fix="pass the weight of this layer, or None",
            )


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes."""
    x, weight = inputs
    assert x is not None
    hidden = x.shape[-1]
    return Description(
        dims=Fields(rows=x.numel() // hidden, hidden=hidden),
        dtypes=Fields(x=dtype_name(x), weight=dtype_name(weight)),
        flags=Fields(casting=options["casting"]),
    )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float64 if x.dtype == torch.float64 else torch.float32


def output_dtype(x: torch.Tensor, weight: torch.Tensor | None, casting: str) -> torch.dtype:
    """The dtype of ``y``: llama's last product promotes, the other families round to that of ``x``."""
    import torch

    return x.dtype if weight is None or casting != "llama" else torch.promote_types(x.dtype, weight.dtype)


def formula(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)`` as the model families write it; x (..., hidden), weight (hidden,), rstd (rows,)."""
    import torch

    wide = x.to(_statistics_dtype(x))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    if weight is None:
        y = normed.to(x.dtype)
    elif casting == "llama":
        y = (weight + offset if offset else weight) * normed.to(x.dtype)
    else:
        y = (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)
    return y, rstd.reshape(-1)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """``y`` in plain, differentiable PyTorch.

    Args:
        x: (..., hidden), floating.
        weight: (hidden,), or None.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting: the model family whose roundings apply.
    """
    return formula(x, weight, eps, offset, casting)[0]


def _scheme_reference(x: torch.Tensor, weight: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, ...]:
    return formula(x, weight, **options)


def allocate(x: torch.Tensor, weight: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, ...]:
    """Empty ``(y, rstd)``: y has the shape of x, and its strides where its last dimension is contiguous."""
    import torch

    dtype = output_dtype(x, weight, options["casting"])
    rows = math.prod(x.shape[:-1])  # torch.Size.numel would turn a symbolic size into a constant
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout), x.new_empty(rows, dtype=_statistics_dtype(x))


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64; random rounding errors add as the root of the sum of squares."""
    x, weight = inputs
    (dy,) = grad_outputs
    assert x is not None
    assert dy is not None
    y, rstd = formula(x, weight, **options)
    rstd = rstd.view(*x.shape[:-1], 1)
    normed = x * rstd
    scaled = dy if weight is None else dy * (weight + options["offset"])
    terms = scaled * normed
    shift = terms.mean(-1, keepdim=True).abs() + terms.pow(2).sum(-1, keepdim=True).sqrt() / x.shape[-1]
    sizes = {
        "y": y.abs(),
        "rstd": rstd.reshape(-1),
        "grad_x": rstd * (scaled.abs() + normed.abs() * shift),
    }
    if weight is not None:
        rows = (dy * normed).reshape(-1, x.shape[-1])
        sizes["grad_weight"] = rows.sum(0).abs() + rows.pow(2).sum(0).sqrt()
    return sizes


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(x, weight)`` for a problem, x of shape (rows, hidden); on the meta device without values."""
    import torch

    x = fill((problem.rows, problem.hidden), getattr(torch, str(problem.dtypes["x"])), device, seed, style)
    if problem.dtypes["weight"] == "none":
        return x, None
    dtype = getattr(torch, str(problem.dtypes["weight"]))
    weight = fill((problem.hidden,), dtype, device, seed + 1, "random", 0.25)
    return x, weight + 1 if str(device) != "meta" else weight


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows at the true width, a multiple of no tile: 261 is four tiles of the tallest, 64 rows, and a tail of 5.

    They are fewer than a device has programs. That each of these goes round is verified with few units, and what
    depends on the number of rows at the problem's own.
    """
    # 2^21 elements keep one check under 20 ms on a GPU; the width is in the code and is never changed.
    rows = max(3, min(261, (1 << 21) // problem.hidden))
    return ({"rows": rows}, {"rows": 1})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The norms of a model: over the hidden size, and over the head size where queries and keys are normalised."""
    if architecture.norm != "rms_norm":
        return
    sizes = [(tokens, architecture.hidden)]
    if architecture.qk_norm:
        sizes += [(tokens * n, architecture.head_dim) for n in {architecture.heads, architecture.kv_heads}]
    for rows, hidden in sizes:
        yield Description(
            Fields(rows=rows, hidden=hidden), Fields(x=dtype, weight=dtype), Fields(casting=architecture.norm_casting)
        )


OP = Op(
    name="rms_norm",
    doc="Root-mean-square normalisation over the last dimension.",
    inputs=(Input("x"), Input("weight", optional=True)),
    options=(
        Option("eps", float, 1e-6, minimum=0.0, doc="added to the mean of squares"),
        Option("offset", float, 0.0, doc="added to the weight; 1 for Gemma"),
        Option("casting", str, "llama", choices=CASTINGS, doc="the model family whose roundings apply"),
    ),
    outputs=("y",),
    schemes=(Scheme("default", ("x", "weight"), ("rstd",), allocate, _scheme_reference),),
    dims={"rows": DimKind.BUCKET, "hidden": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={"y": (), "rstd": ("hidden",), "grad_x": ("hidden",), "grad_weight": ("rows",)},
    example=example,
    proxies=proxies,
    calls=calls,
    order={
        FORWARD: ("multi_row", "row", "column_split", "row_chunks", "functional", "eager"),
        BACKWARD: ("persistent", "column_split", "row_chunks", "eager", "functional"),
    },
)
