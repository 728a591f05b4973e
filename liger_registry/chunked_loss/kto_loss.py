"""Kahneman-Tversky optimisation over an output head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from liger_registry.chunked_loss import kto as losses
from liger_registry.chunked_loss._checks import check_chunking, check_flags
from liger_registry.chunked_loss.head import PLAIN, Head

Tensor = torch.Tensor


class LigerFusedLinearKTOLoss(nn.Module):
    """Kahneman-Tversky optimisation over an output head, without (tokens, vocab) of logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: the factor of rewards.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        use_ref_model: whether there is a reference model.
        average_log_prob: whether a sequence's score is the mean of its tokens' log-probabilities, or their sum.
        chunk_size: without effect; how much is computed at once is chosen by memory.
        loss_type: ``kto`` or ``apo_zero_unpaired``.
        desirable_weight: the factor of wanted sequences' losses.
        undesirable_weight: that of the others.
        head: how logits are made.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        head: Head = PLAIN,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_chunking(face, compiled, chunk_size)
        check_flags(face, use_ref_model=use_ref_model, average_log_prob=average_log_prob)
        losses.check(face, loss_type, beta, desirable_weight, undesirable_weight)
        self.ignore_index = ignore_index
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.loss_type = loss_type
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self.head = head

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor | nn.Module,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | nn.Module | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``(loss, metrics)``.

        Metrics are sums, 0-dim each: of the log-probabilities of the wanted sequences and of the others, of their
        logits over tokens and vocabulary, and of their rewards.

        Args:
            _input: (sequences, tokens, hidden).
            lin_weight: (vocab, hidden), the head's; or the head.
            target: (sequences, tokens), int64.
            bias: (vocab,), or None.
            preference_labels: (sequences,), bool, which are wanted.
            ref_input: the reference model's hidden states, of any width.
            ref_weight: its head's weight, or its head.
            ref_bias: (vocab,), or None.
            kl: 0-dim or (sequences,), an estimate of the divergence of policy and reference, see ``kto.kl_estimate``;
                None for 0.
            ref_logps: in place of the reference model, log-probabilities that were computed before: of sequences,
                (sequences,), or of tokens, (sequences, tokens).

        Raises:
            InvalidInputError: shapes that do not fit, or labels or a reference that are missing.
        """
        return losses.kto_loss(
            type(self).__name__,
            lin_weight,
            _input,
            target,
            bias,
            preference_labels,
            ref_input,
            ref_weight,
            ref_bias,
            kl,
            ref_logps=ref_logps,
            ignore_index=self.ignore_index,
            beta=self.beta,
            use_ref_model=self.use_ref_model,
            average_log_prob=self.average_log_prob,
            loss_type=self.loss_type,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            head=self.head,
        )
