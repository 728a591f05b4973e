"""The Jensen-Shannon divergence as a module."""

from __future__ import annotations

import torch

from liger_registry.transformers.functional import liger_jsd

Tensor = torch.Tensor


class LigerJSD(torch.nn.Module):
    """The generalised Jensen-Shannon divergence of log-probabilities, averaged over rows that count.

    Args:
        beta: the teacher's share of the mixture, 0 to 1; 0 is the forward and 1 the reverse KL divergence.
        ignore_index: the label of rows that do not count.
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """The loss, 0-dim in the dtype of ``log_q``.

        Args:
            log_q: (rows, vocab), log-probabilities of the student.
            log_p: (rows, vocab), log-probabilities of the teacher, which gets no gradient.
            shift_labels: (rows,), integers, or None.
        """
        return liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)
