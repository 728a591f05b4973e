"""Cross-entropy of each token from the statistics of its logits, and its derivatives; vectors of one number a token.

See ``ops.fused_linear_cross_entropy`` for the formula. The denominators stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_registry.kernels.linear_slabs import Slopes, Statistics, slopes_of


@dataclass(frozen=True, slots=True)
class Factors:
    """What the terms of each token's loss are multiplied with; 0 for ignored tokens, NaN for targets out of range.

    Attributes:
        counted: (tokens,) bool, whether tokens count.
        loss: (tokens,), of the target's negative log-probability.
        smooth: (tokens,), of ``sum of class_weight * (logsumexp - z)``; None without label smoothing.
        square: (tokens,), of the logsumexp's square; None where that is no part of the loss.
        weights: the sum of the class weights, a float or 0-dim.
        apart: 0-dim, what everything is yet to be multiplied with; None if nothing is.
    """

    counted: Tensor
    loss: Tensor
    smooth: Tensor | None
    square: Tensor | None
    weights: Tensor | float
    apart: Tensor | None

    @classmethod
    def of(
        cls,
        target: Tensor,
        class_weight: Tensor | None,
        num_items: Tensor | None,
        vocab: int,
        dtype: torch.dtype,
        *,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        reduction: str,
        apart: bool = False,
    ) -> Factors:
        """The factors of a call.

        Args:
            target: (tokens,), int64.
            class_weight: (vocab,) in ``dtype``, or None.
            num_items: 0-dim, what the mean divides by, or None.
            vocab: the number of classes.
            dtype: of statistics.
            ignore_index: the target of tokens that do not count.
            label_smoothing: the part of the loss that all classes share.
            lse_square_scale: the factor of the logsumexp's square.
            reduction: ``none``, ``sum`` or ``mean``.
            apart: leave the division of a mean for later: in fp16 the gradient of one token's mean is no number.
        """
        counted = target != ignore_index
        inside = (target >= 0) & (target < vocab)
        base = inside.to(dtype)
        base = base.masked_fill_(~inside, torch.nan).masked_fill_(~counted, 0.0)
        loss, weights = base, float(vocab)
        if class_weight is not None:
            loss = base * class_weight[target.clamp(0, vocab - 1)]
            weights = class_weight.sum()  # type: ignore[assignment]
        smooth, square = base, base
        outside = None
        if reduction == "mean":
            # With nothing to count there is nothing to divide; a target out of range spoils the sum, not the count.
            count = counted.sum().to(dtype) if num_items is None else num_items.to(dtype)
            divisor = count
            if class_weight is not None and num_items is None:
                divisor = torch.where(counted & inside, loss, 0.0).sum()
            factor = _inverse(divisor)
            squares = factor if divisor is count else _inverse(count)
            if apart:
                # Class weights that are all 0 leave the square alone.
                outside = torch.where(factor == 0, squares, factor)
                factor, squares = (torch.where(outside == 0, 0.0, part / outside) for part in (factor, squares))
            loss, smooth, square = loss * factor, base * factor, base * squares
        if label_smoothing:
            loss = loss * (1.0 - label_smoothing)
        return cls(
            counted,
            loss,
            smooth * (label_smoothing / vocab) if label_smoothing else None,
            square * lse_square_scale if lse_square_scale else None,
            weights,
            outside,
        )

    def __getitem__(self, rows: slice | Tensor) -> Factors:
        """Those of some tokens."""

        def cut(vector: Tensor | None) -> Tensor | None:
            return None if vector is None else vector[rows]

        return Factors(
            self.counted[rows], self.loss[rows], cut(self.smooth), cut(self.square), self.weights, self.apart
        )

    def losses(self, found: Statistics) -> tuple[Tensor, Tensor | None]:
        """``(loss, z_loss)`` of each token, the second being part of the first; None where there is none."""
        gap = found.log_rest - found.target_logit
        # Not softplus, which PyTorch cuts off at 20.
        loss = torch.logaddexp(gap, torch.zeros_like(gap)) * self.loss
        square = None
        if self.smooth is not None or self.square is not None:
            whole = torch.logaddexp(found.log_rest, found.target_logit)
            if self.smooth is not None:
                assert found.weighted_sum is not None
                loss = loss + (whole * self.weights - found.weighted_sum) * self.smooth
            if self.square is not None:
                square = torch.where(self.counted, whole.square() * self.square, 0.0)
                loss = loss + square
        return torch.where(self.counted, loss, 0.0), square

    def slopes(self, found: Statistics, upstream: Tensor | None = None) -> Slopes:
        """The derivatives of the loss by the statistics.

        Args:
            found: the statistics.
            upstream: the gradient of the loss, 0-dim or (tokens,); None for 1.
        """
        whole: Tensor | None = None
        if self.smooth is not None:
            whole = self.smooth * self.weights
        if self.square is not None:
            size = 2.0 * torch.logaddexp(found.log_rest, found.target_logit) * self.square
            whole = size if whole is None else whole + size
        weighted, loss = None if self.smooth is None else -self.smooth, self.loss
        if upstream is not None:
            loss = loss * upstream
            whole = None if whole is None else whole * upstream
            weighted = None if weighted is None else weighted * upstream
        return slopes_of(found, loss, whole, weighted)


def _inverse(number: Tensor) -> Tensor:
    """1 / number, 0 of 0: nothing to count is no loss."""
    return torch.where(number == 0, 0.0, 1.0 / number)
