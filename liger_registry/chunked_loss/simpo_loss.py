"""Simple preference optimisation over an output head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from liger_registry.chunked_loss._checks import check_chunking
from liger_registry.chunked_loss.cpo_loss import check
from liger_registry.chunked_loss.head import PLAIN, Head
from liger_registry.chunked_loss.preference import Result, preference_loss
from liger_registry.chunked_loss.simpo import simpo

Tensor = torch.Tensor


def simpo_loss(
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
    gamma: float = 0.5,
    head: Head = PLAIN,
) -> Result:
    """The loss and its metrics; arguments as of ``LigerFusedLinearSimPOLoss``."""
    check(face, "sigmoid", beta, label_smoothing, compute_nll_loss, alpha)
    return preference_loss(
        face,
        simpo,
        {"beta": beta, "gamma": gamma, "label_smoothing": label_smoothing},
        weight,
        hidden,
        target,
        bias,
        compute_nll_loss=compute_nll_loss,
        alpha=alpha,
        average_log_prob=True,
        separable=True,
        ignore_index=ignore_index,
        head=head,
    )


class LigerFusedLinearSimPOLoss(nn.Module):
    """Simple preference optimisation over an output head, without (tokens, vocab) of logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: the factor of rewards.
        alpha: the factor of the chosen sequences' negative log-likelihood.
        label_smoothing: the part of the labels taken to be wrong.
        compute_nll_loss: whether the likelihood is added.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        gamma: the margin that rewards are to differ by.
        chunk_size: without effect; how much is computed at once is chosen by memory.
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
        gamma: float = 0.5,
        chunk_size: int = 1,
        *,
        head: Head = PLAIN,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_chunking(face, compiled, chunk_size)
        check(face, "sigmoid", beta, label_smoothing, compute_nll_loss, alpha)
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.gamma = gamma
        self.chunk_size = chunk_size
        self.head = head

    def forward(
        self, lin_weight: Tensor | nn.Module, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Result:
        """``(loss, metrics)``, of means over tokens; arguments and errors as of ``LigerFusedLinearCPOLoss``."""
        return simpo_loss(
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
            gamma=self.gamma,
            head=self.head,
        )
