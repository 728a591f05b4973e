"""How far a student's logits are from a teacher's, slab by slab: a loss for each row, and its gradient.

A divergence is given two slabs of logits in the dtype their heads made them, and works on a few rows at a time, because
in fp32 a slab of 2,048 rows of 128,256 logits would take a gigabyte for each step of a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from liger_registry.kernels.group_loss import recording
from liger_registry.kernels.linear_products import row_slabs, wide
from liger_registry.runtime import registry

Tensor = torch.Tensor
#: Bytes of one fp32 copy of the rows that are worked on at once.
AT_ONCE = 64 << 20


class Divergence(Protocol):
    """A loss of rows of logits."""

    def __call__(
        self, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, factor: Tensor | None
    ) -> Tensor:
        """The losses of rows, (rows,) in the wide dtype, 0 where they do not count.

        Args:
            student: (rows, vocab); with a factor overwritten with the gradient of the losses' sum times it.
            teacher: (rows, vocab).
            counted: (rows,), bool.
            temperature: what both are divided by first.
            factor: 0-dim in the wide dtype, or None where no gradient is wanted.
        """


def pieces(slab: Tensor) -> list[slice]:
    """The rows that are worked on at once."""
    return [*row_slabs(slab.shape[0], max(1, AT_ONCE // (4 * max(slab.shape[1], 1))))]


@dataclass(frozen=True, slots=True)
class JensenShannon:
    """The generalised Jensen-Shannon divergence, by the operation of the registry; see ``ops.jsd``.

    Attributes:
        beta: the teacher's share of the mixture, 0 to 1.
    """

    beta: float

    def __call__(
        self, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, factor: Tensor | None
    ) -> Tensor:
        """See ``Divergence``."""
        operation = registry.get("logit_divergence")
        gradient = factor is not None
        labels = counted.long()
        losses = student.new_empty(student.shape[0], dtype=wide(student.dtype))
        for rows in [slice(0, student.shape[0])] if student.is_cuda else pieces(student):
            part = student[rows]
            found = operation(
                part,
                teacher[rows],
                labels[rows],
                factor,
                beta=self.beta,
                ignore_index=0,
                temperature=temperature,
                gradient=gradient,
                in_place=gradient,
            )
            losses[rows], slope = found if gradient else (found, None)
            if slope is not None and slope.data_ptr() != part.data_ptr():  # it may work in place, it need not
                part.copy_(slope)
        return losses


@dataclass(frozen=True, slots=True)
class Cosine:
    """``beta * (1 - cos)`` of the angle between both rows of logits, whatever their temperature.

    With the unit vectors ``u`` and ``v`` it is ``beta * |u - v|^2 / 2``, which is 0 with a gradient of 0 for equal
    rows, where ``1 - u . v`` is a rounding.

    Attributes:
        beta: the factor.
    """

    beta: float

    def __call__(
        self, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, factor: Tensor | None
    ) -> Tensor:
        """See ``Divergence``."""
        dtype = wide(student.dtype)
        losses = student.new_empty(student.shape[0], dtype=dtype)
        for rows in pieces(student):
            u, v = student[rows].to(dtype, copy=True), teacher[rows].to(dtype, copy=True)
            length = u.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            u /= length
            v /= v.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            v -= u
            half = v.square().sum(-1, keepdim=True) / 2
            # A row of zeros has no direction: the cosine is 0 by convention, and there is no gradient.
            nothing = (u == 0).all(-1, keepdim=True)
            half = torch.where(nothing, 1.0, half)
            here = counted[rows, None]
            losses[rows] = torch.where(here, self.beta * half, 0.0).squeeze(-1)
            if factor is not None:
                scale = torch.where(here & ~nothing, -self.beta * factor / length, 0.0)
                student[rows] = v.add_(u.mul_(half)).mul_(scale).to(student.dtype)
        return losses


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A divergence of a user's own, by autograd.

    Attributes:
        function: ``(student, teacher, **settings)`` to the losses of rows, of logits in fp32 (float64: float64) that
            were divided by the temperature.
        settings: its keyword arguments.
    """

    function: Callable[..., Tensor]
    settings: Mapping[str, Any]

    def __call__(
        self, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, factor: Tensor | None
    ) -> Tensor:
        """See ``Divergence``."""
        dtype = wide(student.dtype)
        losses = student.new_empty(student.shape[0], dtype=dtype)
        for rows in pieces(student):
            here, leaf = counted[rows], (student[rows].to(dtype) / temperature).requires_grad_(factor is not None)
            with torch.no_grad() if factor is None else recording():
                found = self.function(leaf, teacher[rows].to(dtype) / temperature, **self.settings)
                if factor is not None and found.requires_grad:
                    upstream = torch.where(here, factor / temperature, 0.0).to(found.dtype)
                    (slope,) = torch.autograd.grad(found, leaf, upstream)
                else:  # also a function that reads no student
                    slope = torch.zeros_like(leaf)
            losses[rows] = torch.where(here, found.detach(), 0.0)
            if factor is not None:
                # Rows that do not count may hold anything, and 0 times infinity is no 0.
                student[rows] = torch.where(here[:, None], slope, 0.0).to(student.dtype)
        return losses
