"""``kl_div``: the Kullback-Leibler divergence, element by element as in ``torch.nn.functional.kl_div``.

``input`` is x = log q, ``target`` is p, or y = log p with ``log_target``. Each element adds
``p (log max(p, eps) - x)``, or ``exp(y) (y - x)``, and has the derivative ``-p`` by x. Where p is 0 both are 0,
whatever x is. ``eps`` is a floor within the logarithm, as in liger-kernel 0.8.5: a target p below it adds
``p log(eps / p)`` too much, less than eps each. With ``eps=0`` it is torch's function.

Reductions and labels are those of ``_divergences``; ``batchmean`` divides by the number of rows, which is what torch
does with two dimensions, and not by the first of more. The loss is in fp32 (float64 inputs: float64), where torch
rounds it to the dtype of ``input``. liger-kernel and torch with ``log_target`` give NaN for 0 * (log 0 - log 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.op import Description, Op, Option
from liger_registry.ops import _divergences as d

if TYPE_CHECKING:
    import torch

    from liger_registry.config import Scalar
    from liger_registry.problem import Problem

    Tensors = tuple[torch.Tensor | None, ...]


def terms(x: torch.Tensor, target: torch.Tensor, log_target: bool, eps: float) -> torch.Tensor:
    """Each element's term, differentiable by x; both in the dtype of sums."""
    import torch

    if log_target:
        return d.forward_kl(x, target)
    return target * torch.where(target == 0, 0.0, target.clamp_min(eps).log() - x)


def reference(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The loss in plain, differentiable PyTorch, in fp32 or float64.

    Args:
        input: (..., vocab), log-probabilities.
        target: (..., vocab), probabilities, or log-probabilities with ``log_target``.
        shift_labels: (...), integers; where they are ``ignore_index`` the row does not count.
        reduction: ``none``, ``sum``, ``mean`` or ``batchmean``.
        log_target: the target is in log space.
        eps: the floor of a probability in its logarithm; without effect with ``log_target``.
        ignore_index: the label of rows that do not count.
    """
    loss, _ = d.reduced(lambda x, y: terms(x, y, log_target, eps), input, target, shift_labels, reduction, ignore_index)
    return loss.to(d.wide(input.dtype))


def sizes(x: torch.Tensor, y: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of what makes up each element's term and its derivative, float64."""
    import torch

    if options["log_target"]:
        p, log_p = y.exp(), y
    else:
        p, log_p = y, y.clamp_min(options["eps"]).log()
    off = d.condition(log_p) if options["log_target"] else 1.0
    return p.abs() * torch.where(p == 0, 0.0, log_p.abs() + x.abs()) * off, p.abs() * off


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64."""
    return d.magnitudes(sizes, inputs, grad_outputs, options)


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes."""
    return d.described(inputs, options, log_target=options["log_target"])


def fixed(problem: Problem) -> Mapping[str, Scalar]:
    """Options of a problem's class."""
    return {"reduction": d.fixed_reduction(problem)}


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes, and every flag at one of them."""
    return d.odd(dtype, [{"log_target": value} for value in (False, True)])


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(input, target, shift_labels)`` for a problem."""
    return d.example(problem, device, seed, style, (True, bool(problem.log_target)))


OP = Op(
    name="kl_div",
    doc="Kullback-Leibler divergence from log-probabilities to a target.",
    inputs=d.INPUTS,
    options=(
        d.REDUCTION,
        Option("log_target", bool, False, doc="the target is in log space"),
        Option("eps", float, 1e-10, minimum=0.0, doc="the floor of a probability in its logarithm"),
        d.IGNORE_INDEX,
    ),
    outputs=("loss",),
    schemes=(d.scheme(reference, keeps_dtype=False),),
    dims=d.DIMS,
    validate=d.validator("kl_div"),
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
