"""Odds ratio preference optimisation over an output head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from liger_registry.chunked_loss._checks import at_least_zero, check_chunking, check_flags, check_number
from liger_registry.chunked_loss.head import PLAIN, Head
from liger_registry.chunked_loss.orpo import orpo
from liger_registry.chunked_loss.preference import Result, preference_loss

Tensor = torch.Tensor


def check(face: str, beta: float, compute_nll_loss: bool) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these."""
    check_number(face, "beta", beta, at_least_zero, "the loss is multiplied by it", "pass 0.1")
    check_flags(face, compute_nll_loss=compute_nll_loss)


def orpo_loss(
    face: str,
    weight: Tensor | nn.Module,
    hidden: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    nll_target: Tensor | None = None,
    *,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    head: Head = PLAIN,
) -> Result:
    """The loss and its metrics; arguments as of ``LigerFusedLinearORPOLoss``."""
    check(face, beta, compute_nll_loss)
    return preference_loss(
        face,
        orpo,
        {"beta": beta},
        weight,
        hidden,
        target,
        bias,
        nll_target=nll_target,
        compute_nll_loss=compute_nll_loss,
        average_log_prob=True,
        separable=True,
        ignore_index=ignore_index,
        head=head,
    )


class LigerFusedLinearORPOLoss(nn.Module):
    """Odds ratio preference optimisation over an output head, without (tokens, vocab) of logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: the factor of the odds ratio's loss.
        compute_nll_loss: whether the chosen sequences' negative log-likelihood is added.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        chunk_size: without effect; how much is computed at once is chosen by memory.
        head: how logits are made.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        *,
        head: Head = PLAIN,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_chunking(face, compiled, chunk_size)
        check(face, beta, compute_nll_loss)
        self.ignore_index = ignore_index
        self.beta = beta
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.head = head

    def forward(
        self,
        lin_weight: Tensor | nn.Module,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> Result:
        """``(loss, metrics)``.

        Metrics are the mean log-probabilities of the chosen and of the rejected sequences, (pairs,) each, the means of
        their logits, the chosen ones' negative log-likelihood, both rewards, (pairs,) each, and the means of ``log
        s(log odds ratio)`` and of the log odds ratio.

        Args:
            lin_weight: (vocab, hidden), the head's; or the head.
            _input: (2 * pairs, tokens, hidden), chosen sequences first.
            target: (2 * pairs, tokens), int64.
            bias: (vocab,), or None.
            nll_target: (2 * pairs, tokens) of which the first half counts, or that half: targets of the likelihood,
                where they are others than those of the odds, such as the prompt's too.

        Raises:
            InvalidInputError: shapes that do not fit, or an odd number of sequences.
        """
        return orpo_loss(
            type(self).__name__,
            lin_weight,
            _input,
            target,
            bias,
            nll_target,
            ignore_index=self.ignore_index,
            beta=self.beta,
            compute_nll_loss=self.compute_nll_loss,
            head=self.head,
        )
