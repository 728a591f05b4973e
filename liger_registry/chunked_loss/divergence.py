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

    By an operation of the registry, see ``ops.logit_cosine``, which has a cross-entropy of the student's logits from
    the same walk over them.

    Attributes:
        beta: the factor.
    """

    beta: float

    def __call__(
        self, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, factor: Tensor | None
    ) -> Tensor:
        """See ``Divergence``."""
        return self._found(student, teacher, counted.long(), 0, factor, 1.0, None)[0]

    def with_cross_entropy(
        self,
        student: Tensor,
        teacher: Tensor,
        labels: Tensor,
        ignore_index: int,
        factor: Tensor | None,
        weights: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:
        """The losses of rows and their cross-entropies, each (rows,) in the wide dtype, 0 where rows do not count.

        Args:
            student: (rows, vocab); with a factor overwritten with the gradient of both sums times their weights and it.
            teacher: (rows, vocab).
            labels: (rows,), int64.
            ignore_index: the label of rows that do not count.
            factor: 0-dim in the wide dtype, or None where no gradient is wanted.
            weights: of the losses and of the cross-entropies.
        """
        losses, nll = self._found(student, teacher, labels, ignore_index, factor, *weights)
        assert nll is not None
        return losses, nll

    def _found(
        self,
        student: Tensor,
        teacher: Tensor,
        labels: Tensor,
        ignore_index: int,
        factor: Tensor | None,
        soft: float,
        hard: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The losses of rows, and their cross-entropies if those have a weight."""
        gradient, cross_entropy = factor is not None, hard is not None
        found = registry.get("logit_cosine")(
            student,
            teacher,
            labels,
            factor,
            soft=self.beta * soft,
            hard=0.0 if hard is None else hard,
            cross_entropy=cross_entropy,
            ignore_index=ignore_index,
            gradient=gradient,
            in_place=gradient,
        )
        distances, *others = found if isinstance(found, tuple) else (found,)
        if gradient and others[-1].data_ptr() != student.data_ptr():  # it may work in place, it need not
            student.copy_(others[-1])
        return self.beta * distances, others[0] if cross_entropy else None


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
