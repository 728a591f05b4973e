"""``jsd``: the generalised Jensen-Shannon divergence of log-probabilities (Agarwal et al., 2024, arXiv:2306.13649).

``input`` is x = log q of the student, ``target`` y = log p of the teacher. With m = beta p + (1 - beta) q, each element
adds ``beta p (y - log m) + (1 - beta) q (x - log m)``, with the derivative ``(1 - beta) q (x - log m)`` by x. For beta
0 and 1 the terms are by convention those of the KL divergences, where the formula would give 0:

===== ====================================== ================
beta  term                                   derivative by x
===== ====================================== ================
0     ``p (y - x)``, the forward divergence  ``-p``
1     ``q (x - y)``, the reverse divergence  ``q (x - y + 1)``
===== ====================================== ================

Reductions and labels are those of ``_divergences``; the loss has the dtype of ``input``. With beta between 0 and 1,
equal elements give exactly 0 and a gradient of exactly 0, and any gap is finite, -inf included. liger-kernel 0.8.5
computes m of 1/2 + 1/2, whose logarithm is a rounding away from 0, gives NaN where an element is -inf in both, and
divides by 0 where no row counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.errors import UnsupportedOptionError
from liger_registry.op import Description, Op, Option
from liger_registry.ops import _divergences as d

if TYPE_CHECKING:
    import torch

    from liger_registry.config import Scalar
    from liger_registry.problem import Problem

    Tensors = tuple[torch.Tensor | None, ...]

# Of each kind of code a beta; .3, because .5 would hide that p and q were mixed up.
KINDS = {"mixture": 0.3, "forward": 0.0, "reverse": 1.0}
BETA = Option("beta", float, 0.5, minimum=0.0, doc="the share of the target in the mixture, from 0 to 1")


def kind_of(beta: float) -> str:
    """Which code a beta runs: that of either KL divergence, or of their mixture."""
    return {0.0: "forward", 1.0: "reverse"}.get(beta, "mixture")


def check_beta(op: str, beta: float) -> None:
    """Raise UnsupportedOptionError if beta is beyond 1."""
    if beta > 1:
        raise UnsupportedOptionError(
            f"option 'beta' of {op} cannot be {beta!r}",
            why="it is a share, from 0 to 1",
            fix="pass beta=0.5, its default, or leave it out",
        )


def terms(x: torch.Tensor, y: torch.Tensor, beta: float) -> torch.Tensor:
    """Each element's term, differentiable; x and y are log-probabilities in the dtype of sums."""
    import torch

    if beta == 0:
        return d.forward_kl(x, y)
    if beta == 1:
        return d.forward_kl(y, x)
    # exp(-1e4) is 0 too, and no -inf meets another.
    x, y = (torch.where(t == -torch.inf, -1e4, t) for t in (x, y))
    higher = x >= y
    gap = torch.where(higher, y - x, x - y)
    share = torch.full_like(x, 1 - beta).masked_fill(higher, beta)
    log_m = torch.log1p(share * torch.expm1(gap))  # from the larger of both, so at most 0
    # What the logarithms and log m add to the derivative is 0 in sum, but only up to roundings; so they are constants.
    upper, lower = ((share - 1) * log_m).detach(), (share * (gap - log_m)).detach()
    return torch.where(higher, x, y).exp() * upper + torch.where(higher, y, x).exp() * lower


def reference(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> torch.Tensor:
    """The loss in plain, differentiable PyTorch, in the dtype of ``input``.

    Args:
        input: (..., vocab), log-probabilities of the student.
        target: (..., vocab), log-probabilities of the teacher.
        shift_labels: (...), integers; where they are ``ignore_index`` the row does not count.
        beta: the share of the target in the mixture, from 0 to 1.
        ignore_index: the label of rows that do not count.
        reduction: ``none``, ``sum``, ``mean`` or ``batchmean``.
    """
    loss, _ = d.reduced(lambda x, y: terms(x, y, beta), input, target, shift_labels, reduction, ignore_index)
    return loss.to(input.dtype)


def sizes(x: torch.Tensor, y: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of what makes up each element's term and its derivative, float64."""
    import torch

    beta = options["beta"]
    p, q, off = y.exp(), x.exp(), d.condition(x, y)
    gap = torch.where(torch.minimum(p, q) == 0, 0.0, (x - y).abs())
    if beta == 0:
        return p * (gap + 1e-3) * off, p * off
    if beta == 1:
        return q * (gap + 1e-3) * off, q * (gap + 1) * off
    log_m = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
    both = (d.forward_kl(log_m, t).abs() + t.exp() * gap for t in (x, y))
    of_x, of_y = ((1 - beta) * next(both) * off, beta * next(both) * off)
    return of_x + of_y, of_x


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: shapes that differ, no last dimension, or a vocabulary of zero.
        UnsupportedDtypeError: a dtype that the contract does not have.
        UnsupportedOptionError: a beta beyond 1.
    """
    d.validator("jsd")(inputs, options)
    check_beta("jsd", options["beta"])


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64."""
    return d.magnitudes(sizes, inputs, grad_outputs, options)


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and which divergence it is."""
    return d.described(inputs, options, divergence=kind_of(options["beta"]))


def fixed(problem: Problem) -> Mapping[str, Scalar]:
    """Options of a problem's class."""
    return {"beta": KINDS[str(problem.divergence)], "reduction": d.fixed_reduction(problem)}


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes, and every flag at one of them."""
    return d.odd(dtype, [{"divergence": kind} for kind in KINDS])


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(input, target, shift_labels)`` for a problem."""
    return d.example(problem, device, seed, style, (True, True))


OP = Op(
    name="jsd",
    doc="Generalised Jensen-Shannon divergence of two sets of log-probabilities.",
    inputs=d.INPUTS,
    options=(BETA, d.IGNORE_INDEX, d.REDUCTION),
    outputs=("loss",),
    schemes=(d.scheme(reference, keeps_dtype=True),),
    dims=d.DIMS,
    validate=validate,
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
