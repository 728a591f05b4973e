"""Softmax as a layer."""

from __future__ import annotations

import torch

from liger_registry.transformers.functional import liger_softmax


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Probabilities of the shape and dtype of x."""
        return liger_softmax(x)
