"""``softmax``: ``y = exp(x - max) / sum(exp(x - max))`` over the last dimension, rounded once to the dtype of ``x``.

Maximum, exponentials and sum are in fp32 (float64 inputs: float64), as in ``torch.softmax``. Entries of -inf give 0; a
row of nothing but -inf, or with +inf or NaN anywhere, gives NaN, as torch does. The derivative
``dx = y * (dy - sum(dy * y))`` needs the output alone, so that the input is not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Scheme, check_dtype, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

DTYPES = ("float32", "float16", "bfloat16", "float64")
# Odd sizes, the middling one first; 5000 is wider than a block of the implementations that loop.
SIZES = ((5, 41), (5, 1), (37, 3), (3, 1536), (0, 41), (1, 41), (3, 5000))


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: no last dimension, or a width of zero.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    (x,) = inputs
    assert x is not None
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InvalidInputError(
            f"x of softmax has shape {tuple(x.shape)}",
            why="it normalises the last dimension, which must be at least 1 wide",
            fix="pass x of shape (..., width) with width >= 1",
        )
    check_dtype("softmax", x, DTYPES, "x")


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtype."""
    (x,) = inputs
    assert x is not None
    width = x.shape[-1]
    return Description(Fields(rows=x.numel() // width, width=width), Fields(x=dtype_name(x)), Fields())


def reference(x: torch.Tensor) -> torch.Tensor:
    """``y`` in plain, differentiable PyTorch.

    Args:
        x: (..., width), floating.
    """
    import torch

    return torch.softmax(x, -1)


def _scheme_reference(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (reference(x),)


def _scheme_backward(dy: torch.Tensor, y: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None]:
    """``(dx,)`` in plain PyTorch from the output, in the statistics' dtype and rounded once."""
    import torch

    if not needs[0]:
        return (None,)
    wide = torch.promote_types(y.dtype, torch.float32)
    product = dy.to(wide) * y
    return (torch.addcmul(product, y.to(wide), product.sum(-1, keepdim=True), value=-1).to(y.dtype),)


def allocate(x: torch.Tensor) -> tuple[torch.Tensor]:
    """An empty ``y`` of the shape of x, with its strides where its last dimension is contiguous."""
    import torch

    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    return (torch.empty_like(x, memory_format=layout),)


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64.

    An exponential's relative error in fp32 is its exponent times a rounding. An element may be off by several roundings
    anyway; exponents beyond eight need more.
    """
    (x,), (dy,) = inputs, grad_outputs
    assert x is not None
    assert dy is not None
    y = reference(x)
    exponent = (x - x.amax(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
    size = y * (exponent.abs() / 8).clamp_min(1.0)
    terms = dy * size
    shift = terms.sum(-1, keepdim=True).abs() + terms.pow(2).sum(-1, keepdim=True).sqrt()
    return {"y": size, "grad_x": size * (dy.abs() + shift)}


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(x,)`` for a problem, of shape (rows, width); on the meta device without values."""
    import torch

    return (fill((problem.rows, problem.width), getattr(torch, str(problem.dtypes["x"])), device, seed, style),)


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes; none of the options changes code, because there are none."""
    for rows, width in SIZES:
        yield Description(Fields(rows=rows, width=width), Fields(x=dtype), Fields())


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows at the true width, a multiple of no tile; the width is in the code and is never changed."""
    # 2^21 elements keep one check under 20 ms on a GPU.
    return ({"rows": max(3, min(261, (1 << 21) // problem.width))}, {"rows": 1})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """None: models call it inside their attention, which is another operation, and their routers as a function."""
    return ()


OP = Op(
    name="softmax",
    doc="Softmax over the last dimension.",
    inputs=(Input("x"),),
    options=(),
    outputs=("y",),
    schemes=(
        Scheme(
            "default",
            saved_inputs=(),
            saved_outputs=("y",),
            saved=(),
            allocate=allocate,
            reference=_scheme_reference,
            backward=_scheme_backward,
        ),
    ),
    dims={"rows": DimKind.BUCKET, "width": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={"y": ("width",), "grad_x": ("width",)},
    example=example,
    proxies=proxies,
    calls=calls,
    order={
        FORWARD: ("multi_row", "online", "column_split", "functional", "eager"),
        BACKWARD: ("multi_row", "two_pass", "column_split", "functional", "eager"),
    },
    odd=odd,
)
