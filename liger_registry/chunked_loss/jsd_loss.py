"""The Jensen-Shannon divergence of two output heads, with a cross-entropy, as a module."""

from __future__ import annotations

import torch

from liger_registry.chunked_loss._checks import check_chunking
from liger_registry.chunked_loss.distillation import Distillation, jensen_shannon
from liger_registry.chunked_loss.divergence import Divergence
from liger_registry.chunked_loss.head import PLAIN, Head

Tensor = torch.Tensor


class LigerFusedLinearJSDLoss(Distillation):
    """The generalised Jensen-Shannon divergence of two output heads, without (tokens, vocab) of logits.

    Its mean over tokens that count is added to that of the student's cross-entropy, each times its weight.

    Args:
        weight_hard_loss: the factor of the cross-entropy.
        weight_soft_loss: that of the divergence.
        beta: the teacher's share of the mixture, 0 to 1; 0 is the forward and 1 the reverse KL divergence.
        ignore_index: the label of tokens that do not count.
        temperature: what logits are divided by before the divergence, not before the cross-entropy.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        chunk_size: without effect; how much is computed at once is chosen by memory.
        return_soft_hard_loss: whether ``(loss, soft, hard)`` is returned.
        head: how logits are made, of both heads.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        head: Head = PLAIN,
    ) -> None:
        super().__init__(weight_hard_loss, weight_soft_loss, ignore_index, temperature, return_soft_hard_loss, head)
        check_chunking(type(self).__name__, compiled, chunk_size)
        self.beta = beta
        self.compiled = compiled
        self.chunk_size = chunk_size
        _ = self.divergence

    @property
    def divergence(self) -> Divergence:
        """The loss of rows of both heads' logits."""
        return jensen_shannon(self.beta)
