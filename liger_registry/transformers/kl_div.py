"""The Kullback-Leibler divergence as a module."""

from __future__ import annotations

from typing import Any

import torch

from liger_registry.transformers.functional import liger_kl_div

Tensor = torch.Tensor


class LigerKLDIVLoss(torch.nn.KLDivLoss):
    """``torch.nn.KLDivLoss``, in fp32 (float64 inputs: float64).

    Args:
        eps: the floor of a probability in its logarithm.
        args: as of ``torch.nn.KLDivLoss``.
        kwargs: as of ``torch.nn.KLDivLoss``: ``reduction="mean"`` and ``log_target=False`` by default.
    """

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """The loss of log-probabilities (rows, vocab) against a target of that shape, which gets no gradient."""
        return liger_kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)
