"""A residual addition and the normalisation of the sum as a layer."""

from __future__ import annotations

import torch

from liger_registry.transformers._arguments import check_choice, initial
from liger_registry.transformers.functional import liger_fused_add_rms_norm

Tensor = torch.Tensor


class LigerFusedAddRMSNorm(torch.nn.Module):
    """``(norm(x + residual), x + residual)``, both in the dtype of x.

    Args:
        hidden_size: the width.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting_mode: ``llama``, ``gemma`` or ``none``, the roundings.
        init_fn: ``ones`` or ``zeros``, what the weight starts as.
        in_place: without effect on results; nothing of the caller's is written.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_choice(face, "casting_mode", casting_mode, ("llama", "gemma", "none"))
        self.weight = initial(face, init_fn, hidden_size)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add (..., hidden) and normalise."""
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )

    def extra_repr(self) -> str:
        """The arguments."""
        shape = tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, in_place={self.in_place}"
