"""The Jensen-Shannon divergence of two linear output heads as a module."""

from __future__ import annotations

import torch

from liger_registry.errors import UnsupportedOptionError
from liger_registry.transformers.functional import liger_fused_linear_jsd

Tensor = torch.Tensor


class LigerFusedLinearJSD(torch.nn.Module):
    """The generalised Jensen-Shannon divergence of two linear output heads, without (tokens, vocab) of logits.

    Args:
        jsd_beta: the teacher's share of the mixture, 0 to 1; 0 is the forward and 1 the reverse KL divergence.
        ignore_index: the label of tokens that do not count.
        temperature: what both heads' logits are divided by.
        accum_dtype: what the student head's gradient is summed in over slabs: float32, the dtype of the products, or
            None for the default.

    Raises:
        UnsupportedOptionError: a temperature of 0.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if temperature == 0:
            raise UnsupportedOptionError(
                f"temperature of {type(self).__name__} cannot be 0", why="logits are divided by it", fix="pass 1.0"
            )
        self.jsd_beta = jsd_beta
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.accum_dtype = accum_dtype

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss, 0-dim; only the student gets gradients.

        Args:
            student_input: (tokens, hidden).
            student_weight: (vocab, hidden).
            teacher_input: (tokens, any other width).
            teacher_weight: (vocab, that width).
            shift_labels: (tokens,), integers, or None.
        """
        return liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            self.jsd_beta,
            self.ignore_index,
            self.temperature,
            self.accum_dtype,
        )
