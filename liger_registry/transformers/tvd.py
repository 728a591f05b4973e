"""The total variation distance as a module."""

from __future__ import annotations

import torch

from liger_registry.transformers.functional import liger_tvd

Tensor = torch.Tensor


class LigerTVDLoss(torch.nn.Module):
    """``sum |p - q| / 2`` of probabilities, in fp32 (float64 inputs: float64).

    Args:
        reduction: ``batchmean``, ``mean``, ``sum`` or ``none``.
        ignore_index: the label of rows that do not count.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """The loss.

        Args:
            p: (rows, vocab), what gets a gradient.
            q: (rows, vocab), which gets none.
            shift_labels: (rows,), integers, or None.
        """
        return liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)
