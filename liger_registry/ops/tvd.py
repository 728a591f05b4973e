"""``tvd``: the total variation distance of two distributions, ``sum |q - p| / 2``.

``input`` and ``target`` are probabilities. Each element adds ``|input - target| / 2``, with the derivative
``sign(input - target) / 2`` by input, 0 where both are equal. Reductions and labels are those of ``_divergences``. The
loss is in fp32 (float64 inputs: float64), and so is the difference; liger-kernel 0.8.5 rounds it to the inputs' dtype,
and divides by 0 where no row counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.op import Description, Op
from liger_registry.ops import _divergences as d

if TYPE_CHECKING:
    import torch

    from liger_registry.config import Scalar
    from liger_registry.problem import Problem

    Tensors = tuple[torch.Tensor | None, ...]


def terms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each element's term, differentiable by x; both in the dtype of sums."""
    return (x - y).abs() * 0.5


def reference(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """The loss in plain, differentiable PyTorch, in fp32 or float64.

    Args:
        input: (..., vocab), probabilities.
        target: (..., vocab), probabilities.
        shift_labels: (...), integers; where they are ``ignore_index`` the row does not count.
        reduction: ``none``, ``sum``, ``mean`` or ``batchmean``.
        ignore_index: the label of rows that do not count.
    """
    loss, _ = d.reduced(terms, input, target, shift_labels, reduction, ignore_index)
    return loss.to(d.wide(input.dtype))


def sizes(x: torch.Tensor, y: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of what makes up each element's term and its derivative, float64."""
    found = terms(x, y)
    return found, (found != 0).to(found.dtype) * 0.5


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64."""
    return d.magnitudes(sizes, inputs, grad_outputs, options)


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes."""
    return d.described(inputs, options)


def fixed(problem: Problem) -> Mapping[str, Scalar]:
    """Options of a problem's class."""
    return {"reduction": d.fixed_reduction(problem)}


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes, and every flag at one of them."""
    return d.odd(dtype, [{}])


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(input, target, shift_labels)`` for a problem."""
    return d.example(problem, device, seed, style, (False, False))


OP = Op(
    name="tvd",
    doc="Total variation distance of two distributions.",
    inputs=d.INPUTS,
    options=(d.REDUCTION, d.IGNORE_INDEX),
    outputs=("loss",),
    schemes=(d.scheme(reference, keeps_dtype=False),),
    dims=d.DIMS,
    validate=d.validator("tvd"),
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced=d.REDUCED,
    example=example,
    proxies=d.proxies,
    calls=d.calls,
    order=d.ORDER,
    odd=odd,
    fixed=fixed,
    cut=d.cut,
)
