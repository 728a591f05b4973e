"""``relu_squared``: ``relu(x)^2`` (So and others, 2021), the activation of Nemotron and Arcee, called ``relu2`` there.

``y = round(max(x, 0)^2)``: the square of a bf16 or fp16 number is exact in fp32. Its gradient is ``2 max(x, 0) dy``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.op import Description, DimKind, Input, Op, Scheme, dtype_name
from liger_registry.ops._gated import ORDER, SIZES, check_width, expert_rows, filled, like, proxies

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture
    from liger_registry.problem import Problem

    Tensors = tuple[torch.Tensor | None, ...]


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; errors are those of ``check_width``."""
    (x,) = inputs
    assert x is not None
    check_width("relu_squared", x, "x")


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtype."""
    (x,) = inputs
    assert x is not None
    width = x.shape[-1]
    return Description(Fields(rows=x.numel() // width, width=width), Fields(x=dtype_name(x)), Fields())


def reference(x: torch.Tensor) -> torch.Tensor:
    """``relu(x)^2`` in plain, differentiable PyTorch; x is (..., width), floating."""
    import torch

    return torch.square(torch.relu(x))


def _scheme_reference(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (reference(x),)


def allocate(x: torch.Tensor) -> tuple[torch.Tensor]:
    """An empty ``y``: the shape of x, and its strides where its last dimension is contiguous."""
    return (like(x, x.dtype),)


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The results themselves: there is one term, and no sum."""
    import torch

    (x,), (dy,) = inputs, grad_outputs
    assert x is not None
    assert dy is not None
    positive = torch.relu(x)
    return {"y": positive.square(), "grad_x": 2 * positive * dy.abs()}


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(x,)`` for a problem, of shape (rows, width)."""
    return (filled((problem.rows, problem.width), str(problem.dtypes["x"]), device, seed, style),)


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes; there is nothing else that changes code."""
    for rows, width in SIZES:
        yield Description(Fields(rows=rows, width=width), Fields(x=dtype), Fields())


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The activation of an MLP; of experts together, and of one that sees its share of the tokens."""
    if architecture.activation != "relu2" or not architecture.intermediate:
        return
    for rows in dict.fromkeys(expert_rows(architecture, tokens)):
        yield Description(Fields(rows=rows, width=architecture.intermediate), Fields(x=dtype), Fields())


OP = Op(
    name="relu_squared",
    doc="The square of the positive part.",
    inputs=(Input("x"),),
    options=(),
    outputs=("y",),
    schemes=(Scheme("default", ("x",), (), allocate, _scheme_reference),),
    dims={"rows": DimKind.BUCKET, "width": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={"y": (), "grad_x": ()},
    example=example,
    proxies=proxies,
    calls=calls,
    order=ORDER,
    odd=odd,
)
