"""Contrastive preference optimisation (Xu et al., 2024, arXiv:2401.08417) and its kin, as functions of pairs.

With ``d = beta * (chosen - rejected)`` and ``e`` the label smoothing: ``sigmoid`` is ``-(1 - e) log s(d) - e log
s(-d)``, ``hinge`` ``max(0, 1 - d)``, ``ipo`` ``(chosen - rejected - 1 / (2 beta))^2`` of means over tokens. AlphaPO
(arXiv:2501.03884) replaces both log-probabilities by ``(1 - p^(-alpha)) / alpha``. Defaults are those of TRL's
``CPOConfig``.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from liger_registry.chunked_loss._checks import check_choice, check_number, check_unused, positive, share
from liger_registry.chunked_loss.pairs import Pairs

Tensor = torch.Tensor
LOSS_TYPES = ("sigmoid", "hinge", "ipo")


def check(face: str, loss_type: str, beta: float, label_smoothing: float) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these, or would not read one of them."""
    check_choice(face, "loss_type", loss_type, LOSS_TYPES)
    check_number(face, "beta", beta, positive, "rewards are multiplied by it", "pass 0.1")
    used = ["label_smoothing"] if loss_type == "sigmoid" else []
    check_unused(face, {"label_smoothing": label_smoothing}, {"label_smoothing": 0.0}, used, f"loss_type={loss_type!r}")
    check_number(face, "label_smoothing", label_smoothing, share, "it is a part of all labels", "pass 0.1")


def smoothed(difference: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - e) log s(d) - e log s(-d)``."""
    losses = -logsigmoid(difference)
    return losses if not label_smoothing else losses * (1 - label_smoothing) - logsigmoid(-difference) * label_smoothing


def cpo(
    pairs: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reward_alpha: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(losses, chosen_rewards, rejected_rewards)``, (pairs,) each.

    Args:
        pairs: with sums over tokens as scores, for ``ipo`` with means; there is no reference.
        beta: the factor of rewards.
        label_smoothing: the part of the labels taken to be wrong, for ``sigmoid``.
        loss_type: ``sigmoid``, ``hinge`` or ``ipo``.
        reward_alpha: AlphaPO's alpha, TRL's ``alpha``; 0 leaves log-probabilities as they are.

    Raises:
        UnsupportedOptionError: a value that is not supported, or that nothing would read.
    """
    check("cpo", loss_type, beta, label_smoothing)
    chosen, rejected = pairs.chosen, pairs.rejected
    if reward_alpha:
        chosen, rejected = (-torch.expm1(-reward_alpha * x) / reward_alpha for x in (chosen, rejected))
    difference = chosen - rejected
    if loss_type == "hinge":
        losses = torch.relu(1 - beta * difference)
    elif loss_type == "ipo":
        losses = (difference - 1 / (2 * beta)).square()
    else:
        losses = smoothed(beta * difference, label_smoothing)
    return losses, beta * chosen.detach(), beta * rejected.detach()
