"""The accuracy rule, and its constants in one place.

A result passes if both hold against the reference in float64:

- the norm of its error, ``||y - ref|| / ||ref||``, is at most ``max(1.1 x the error of the model's own formula in that
  dtype, eps(output) + (sqrt(log2 n) + 2) x eps(statistics))``, where ``n`` is what the result is a sum over;
- no element is off by more than
``max(ELEMENT x that bound x the size of the terms it sums, 1.1 x the formula's worst)``.

The first finds a wrong formula, the second a wrong element: one dropped row of 4,096 moves the norm of a bf16 weight
gradient by 1.6 %, which the first would let pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# How much worse than the model's own formula in the same dtype a result may be.
FORMULA = 1.1
# Elements may be off by this many bounds: llama's formula rounds twice (one eps in all) and a sum adds its own; the
# worst of 10^6 elements then lies at about 2 bounds, measured over all styles of inputs.
ELEMENT = 4.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a result is from the reference.

    Attributes:
        name: which result.
        error: ``||y - ref|| / ||ref||``; where the reference is zero, ``||y||``.
        error_limit: what it may be.
        worst: the worst element's error, in units of the element bound.
        worst_limit: what it may be.
        problem: what is wrong, if a number does not say it: a shape, a dtype, an element that is not finite.
    """

    name: str
    error: float
    error_limit: float
    worst: float
    worst_limit: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the rule holds; NaN never passes."""
        return not self.problem and self.error <= self.error_limit and self.worst <= self.worst_limit

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        return (
            f"{self.name}: error {self.error:.2e} (limit {self.error_limit:.2e}), "
            f"worst element {self.worst:.2f} (limit {self.worst_limit:.2f})"
        )


def judge(
    name: str,
    result: torch.Tensor,
    reference: torch.Tensor,
    formula: torch.Tensor,
    magnitude: torch.Tensor,
    reduced: int = 1,
) -> Verdict:
    """Hold one result against the accuracy rule.

    Args:
        name: what it is, for the message.
        result: what the implementation gave.
        reference: the same in float64.
        formula: what the model's own formula gives in the result's dtype.
        magnitude: the size of the terms each element sums, float64.
        reduced: the number of terms that are summed in the statistics' dtype.

    Returns:
        A verdict; it never raises for a wrong result.
    """
    import torch

    wrong = ""
    if result.shape != reference.shape:
        wrong = f"shape {tuple(result.shape)}, not {tuple(reference.shape)}"
    elif result.dtype != formula.dtype:
        wrong = f"dtype {result.dtype}, not {formula.dtype}"
    if wrong:
        return Verdict(name, math.inf, 0.0, math.inf, 0.0, wrong)
    if result.numel() == 0:
        return Verdict(name, 0.0, 0.0, 0.0, 0.0)
    info = torch.finfo(result.dtype)
    statistics = torch.finfo(torch.promote_types(result.dtype, torch.float32)).eps
    bound = info.eps + (math.sqrt(math.log2(max(reduced, 2))) + 2) * statistics

    expected = reference.to(result.dtype)
    # Where the right value is no number of this dtype, the result says so as the reference or the formula does. Where
    # the formula alone overflows, the result does as the formula, or is right.
    alike = (result == expected) | (result == formula) | (result.isnan() & (expected.isnan() | formula.isnan()))
    right, own = expected.isfinite(), formula.isfinite()
    odd = torch.where(right & (own | ~alike), ~result.isfinite(), ~right & ~alike)

    finite, comparable = right & result.isfinite(), right & own
    exact = torch.where(right, reference, 0.0)
    norm = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    tiny = info.smallest_normal * info.eps
    scale = bound * torch.where(right, magnitude, 1.0).abs() + tiny

    def distance(values: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        off = torch.where(where, values.double() - exact, 0.0).abs()
        return off.norm() / norm, (off / scale).max()

    terms = torch.where(finite, magnitude, 0.0).norm() / norm
    numbers = (odd.sum(), norm, terms, *distance(result, finite), *distance(formula, comparable))
    # Together, because each number that is fetched alone has the host wait for the GPU once more.
    count, size, cancelled, error, worst, own_error, own_worst = torch.stack([n.double() for n in numbers]).tolist()
    if count:
        wrong = f"{int(count)} of {odd.numel()} elements are finite where they should not be, or the reverse"
        return Verdict(name, math.inf, 0.0, math.inf, 0.0, wrong)
    # A reference of zeros, and results below the least number of the dtype, are held to the elements' bound alone.
    # Where the terms cancel, as in the gradient of a row of one element, their size is what errors scale with.
    floor = bound * max(1.0, cancelled) + tiny * math.sqrt(result.numel()) / size
    return Verdict(name, error, max(FORMULA * own_error, floor), worst, max(ELEMENT, FORMULA * own_worst))
