"""The squared positive part as a layer."""

from __future__ import annotations

import torch

from liger_registry.transformers.functional import liger_relu_squared


class LigerReLUSquared(torch.nn.Module):
    """The square of the positive part."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``relu(x)^2``, of the shape and dtype of x."""
        return liger_relu_squared(x)
