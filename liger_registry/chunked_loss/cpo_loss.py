"""Contrastive preference optimisation over an output head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from liger_registry.chunked_loss import cpo as losses
from liger_registry.chunked_loss._checks import check_chunking, check_flags, check_unused
from liger_registry.chunked_loss.head import PLAIN, Head
from liger_registry.chunked_loss.preference import Result, preference_loss

Tensor = torch.Tensor


def check(face: str, loss_type: str, beta: float, label_smoothing: float, compute_nll_loss: bool, alpha: float) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these, or would not read one of them."""
    losses.check(face, loss_type, beta, label_smoothing)
    check_flags(face, compute_nll_loss=compute_nll_loss)
    used = ["alpha"] if compute_nll_loss else []
    check_unused(face, {"alpha": alpha}, {"alpha": 1.0}, used, "compute_nll_loss=False")


def cpo_loss(
    face: str,
    weight: Tensor | nn.Module,
    hidden: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    average_log_prob: bool = False,
    loss_type: str = "sigmoid",
    reward_alpha: float = 0.0,
    head: Head = PLAIN,
) -> Result:
    """The loss and its metrics; arguments as of ``LigerFusedLinearCPOLoss``."""
    check(face, loss_type, beta, label_smoothing, compute_nll_loss, alpha)
    check_flags(face, average_log_prob=average_log_prob)
    return preference_loss(
        face,
        losses.cpo,
        {"beta": beta, "label_smoothing": label_smoothing, "loss_type": loss_type, "reward_alpha": reward_alpha},
        weight,
        hidden,
        target,
        bias,
        compute_nll_loss=compute_nll_loss,
        alpha=alpha,
        average_log_prob=average_log_prob or loss_type == "ipo",
        separable=True,
        ignore_index=ignore_index,
        head=head,
    )


class LigerFusedLinearCPOLoss(nn.Module):
    """Contrastive preference optimisation over an output head, without (tokens, vocab) of logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: the factor of rewards.
        alpha: the factor of the chosen sequences' negative log-likelihood.
        label_smoothing: the part of the labels taken to be wrong.
        compute_nll_loss: whether the likelihood is added.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        average_log_prob: whether a sequence's score is the mean of its tokens' log-probabilities, or their sum.
        chunk_size: without effect; how much is computed at once is chosen by memory.
        loss_type: ``sigmoid``, ``hinge`` or ``ipo``, whose scores are means.
        reward_alpha: see ``cpo.cpo``.
        head: how logits are made.

    Raises:
        UnsupportedOptionError: a value that is not supported, or that nothing would read.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "sigmoid",
        reward_alpha: float = 0.0,
        head: Head = PLAIN,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_chunking(face, compiled, chunk_size)
        check(face, loss_type, beta, label_smoothing, compute_nll_loss, alpha)
        check_flags(face, average_log_prob=average_log_prob)
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.loss_type = loss_type
        self.reward_alpha = reward_alpha
        self.head = head

    def forward(
        self, lin_weight: Tensor | nn.Module, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Result:
        """``(loss, metrics)``.

        Metrics are the log-probabilities of the chosen and of the rejected sequences, (pairs,) each, the means of their
        logits, the chosen ones' negative log-likelihood (0 if it is not computed), and both rewards, (pairs,) each.

        Args:
            lin_weight: (vocab, hidden), the head's; or the head.
            _input: (2 * pairs, tokens, hidden), chosen sequences first.
            target: (2 * pairs, tokens), int64.
            bias: (vocab,), or None.

        Raises:
            InvalidInputError: shapes that do not fit, or an odd number of sequences.
        """
        return cpo_loss(
            type(self).__name__,
            lin_weight,
            _input,
            target,
            bias,
            ignore_index=self.ignore_index,
            beta=self.beta,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            compute_nll_loss=self.compute_nll_loss,
            average_log_prob=self.average_log_prob,
            loss_type=self.loss_type,
            reward_alpha=self.reward_alpha,
            head=self.head,
        )
