"""``layer_norm``: layer normalisation (Ba, Kiros and Hinton, 2016) as ``torch.nn.functional.layer_norm`` rounds it.

``y = round((x - mean) / sqrt(var + eps) * weight + bias)`` over the last dimension, ``var`` divided by the width.
Everything before the one rounding is in fp32 (x in float64: float64), and ``y`` has the dtype of x.

x, weight and bias may each have a dtype of its own, unlike torch's, which takes one dtype on GPUs: weight and bias are
cast to the statistics' dtype, which is exact for fp16 and bf16, and each gradient has the dtype of its tensor.
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


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: no last dimension, a width of zero, or a weight or bias of another width.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    x = inputs[0]
    assert x is not None
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InvalidInputError(
            f"x of layer_norm has shape {tuple(x.shape)}",
            why="it normalises the last dimension, which must be at least 1 wide",
            fix="pass x of shape (..., hidden) with hidden >= 1",
        )
    check_dtype("layer_norm", x, DTYPES, "x")
    for name, vector in zip(("weight", "bias"), inputs[1:], strict=True):
        if vector is None:
            continue
        check_dtype("layer_norm", vector, DTYPES, name)
        if vector.shape != x.shape[-1:]:
            raise InvalidInputError(
                f"{name} of layer_norm has shape {tuple(vector.shape)}, x has {tuple(x.shape)}",
                why=f"it normalises the last dimension alone, so the {name} must have shape ({x.shape[-1]},)",
                fix=f"pass the {name} of this layer, or None; flatten the dimensions of a norm over several",
            )


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes."""
    x, weight, bias = inputs
    assert x is not None
    hidden = x.shape[-1]
    return Description(
        dims=Fields(rows=x.numel() // hidden, hidden=hidden),
        dtypes=Fields(x=dtype_name(x), weight=dtype_name(weight), bias=dtype_name(bias)),
        flags=Fields(),
    )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float64 if x.dtype == torch.float64 else torch.float32


def formula(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd)``; x (..., hidden), weight and bias (hidden,), mean and rstd (rows,).

    It is torch's operator on tensors of the statistics' dtype. For bf16 tensors on a CPU the operator would hand over
    statistics in bf16, from which its backward then computes.
    """
    import torch

    wide = _statistics_dtype(x)
    factor, shift = (None if v is None else v.to(wide) for v in (weight, bias))
    y, mean, rstd = torch.native_layer_norm(x.to(wide), x.shape[-1:], factor, shift, eps)
    return y.to(x.dtype), mean.reshape(-1), rstd.reshape(-1)


def reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """``y`` in plain, differentiable PyTorch.

    Args:
        x: (..., hidden), floating.
        weight: (hidden,), or None for a factor of 1.
        bias: (hidden,), or None; also without a weight.
        eps: added to the variance.
    """
    return formula(x, weight, bias, eps)[0]


def allocate(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Empty ``(y, mean, rstd)``: y has the strides of x where its last dimension is contiguous."""
    import torch

    rows = math.prod(x.shape[:-1])  # torch.Size.numel would turn a symbolic size into a constant
    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    mean, rstd = (x.new_empty(rows, dtype=_statistics_dtype(x)) for _ in range(2))
    return torch.empty_like(x, memory_format=layout), mean, rstd


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64; random rounding errors add as the root of the sum of squares."""
    x, weight, bias = inputs
    (dy,) = grad_outputs
    assert x is not None
    assert dy is not None
    hidden = x.shape[-1]
    _, mean, rstd = formula(x, weight, bias, **options)
    mean, rstd = (t.view(*x.shape[:-1], 1) for t in (mean, rstd))
    normed = (x - mean) * rstd
    # A mean far from zero is known to its own last digit, and what is left after it is subtracted no better.
    noisy = (x.abs() + mean.abs()) * rstd
    scaled = dy if weight is None else dy * weight

    def average(terms: torch.Tensor) -> torch.Tensor:
        return terms.mean(-1, keepdim=True).abs() + terms.pow(2).sum(-1, keepdim=True).sqrt() / hidden

    y = noisy if weight is None else noisy * weight.abs()
    sizes = {
        "y": y if bias is None else y + bias.abs(),
        "mean": average(x).reshape(-1),
        "rstd": rstd.reshape(-1),
        "grad_x": rstd * (scaled.abs() + average(scaled) + noisy * average(scaled * normed)),
    }

    def total(terms: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        terms, spread = (t.reshape(-1, hidden) for t in (terms, spread))
        return terms.sum(0).abs() + spread.pow(2).sum(0).sqrt()

    if weight is not None:
        sizes["grad_weight"] = total(dy * normed, dy * noisy)
    if bias is not None:
        sizes["grad_bias"] = total(dy, dy)
    return sizes


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(x, weight, bias)`` for a problem, x of shape (rows, hidden); on the meta device without values."""
    import torch

    x = fill((problem.rows, problem.hidden), getattr(torch, str(problem.dtypes["x"])), device, seed, style)

    def vector(name: str, number: int) -> torch.Tensor | None:
        dtype = str(problem.dtypes[name])
        if dtype == "none":
            return None
        return fill((problem.hidden,), getattr(torch, dtype), device, seed + number, "random", 0.25)

    weight, bias = vector("weight", 1), vector("bias", 2)
    return x, weight + 1 if weight is not None and str(device) != "meta" else weight, bias


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows at the true width, a multiple of no tile: 261 is four tiles of the tallest, 64 rows, and a tail of 5."""
    # 2^21 elements keep one check under 20 ms on a GPU; the width is in the code and is never changed.
    rows = max(3, min(261, (1 << 21) // problem.hidden))
    return ({"rows": rows}, {"rows": 1})


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes with all of it, then what is absent, and tensors of different dtypes."""

    def described(rows: int, hidden: int, weight: str = dtype, bias: str = dtype) -> Description:
        return Description(Fields(rows=rows, hidden=hidden), Fields(x=dtype, weight=weight, bias=bias), Fields())

    sizes = [(5, 41), (5, 3), (5, 1536)]
    for rows, hidden in (*sizes, (5, 1), (0, 41), (1, 41), (37, 41)) if dtype == "bfloat16" else sizes:
        yield described(rows, hidden)
    yield described(5, 41, "none", "none")
    yield described(5, 41, bias="none")
    yield described(5, 41, weight="none")
    if dtype == "bfloat16":
        yield described(5, 41, "float32", "float32")
        yield described(5, 41, "float16", "float32")


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The norms of a model over the hidden size; nearly all have a bias."""
    if architecture.norm == "layer_norm":
        yield Description(
            Fields(rows=tokens, hidden=architecture.hidden), Fields(x=dtype, weight=dtype, bias=dtype), Fields()
        )


OP = Op(
    name="layer_norm",
    doc="Layer normalisation over the last dimension.",
    inputs=(Input("x"), Input("weight", optional=True), Input("bias", optional=True)),
    options=(Option("eps", float, 1e-5, minimum=0.0, doc="added to the variance"),),
    outputs=("y",),
    schemes=(Scheme("default", ("x", "weight", "bias"), ("mean", "rstd"), allocate, formula),),
    dims={"rows": DimKind.BUCKET, "hidden": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={
        "y": ("hidden",),
        "mean": ("hidden",),
        "rstd": ("hidden",),
        "grad_x": ("hidden",),
        "grad_weight": ("rows",),
        "grad_bias": ("rows",),
    },
    example=example,
    proxies=proxies,
    calls=calls,
    odd=odd,
    order={
        FORWARD: ("multi_row", "row", "column_split", "functional", "eager"),
        BACKWARD: ("persistent", "column_split", "functional", "eager"),
    },
)
