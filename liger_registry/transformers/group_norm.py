"""Normalisation over groups of channels as a layer."""

from __future__ import annotations

import torch

from liger_registry.errors import UnsupportedOptionError
from liger_registry.transformers._arguments import initial
from liger_registry.transformers.functional import liger_group_norm

Tensor = torch.Tensor


class LigerGroupNorm(torch.nn.Module):
    """Normalisation over groups of channels and all positions.

    Args:
        num_channels: those of the input.
        num_groups: how many groups they are in; divides ``num_channels``.
        eps: added to the variance.
        bias: whether the bias starts as random numbers; there is one in any case, else of zeros.
        init_fn: ``ones`` or ``zeros``, what the weight starts as.

    Raises:
        UnsupportedOptionError: channels that do not divide into groups, or another ``init_fn``.
    """

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise UnsupportedOptionError(
                f"num_groups of {type(self).__name__} cannot be {num_groups}",
                why=f"{num_channels} channels do not divide into so many groups",
                fix="pass a divisor of num_channels",
            )
        self.num_channels = num_channels
        self.num_groups = num_groups
        self.eps = self.variance_epsilon = eps
        self.weight = initial(type(self).__name__, init_fn, num_channels)
        self.bias = torch.nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise (batch, channels, ...), of at least three dimensions."""
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        """The arguments."""
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"
