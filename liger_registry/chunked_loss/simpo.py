"""Simple preference optimisation (Meng et al., 2024, arXiv:2405.14734) as a function of pairs.

``-(1 - e) log s(d) - e log s(-d)`` with ``d = beta * (chosen - rejected) - gamma``, of means over tokens, and ``e`` the
label smoothing.
"""

from __future__ import annotations

import torch

from liger_registry.chunked_loss import cpo
from liger_registry.chunked_loss.pairs import Pairs

Tensor = torch.Tensor


def simpo(
    pairs: Pairs, *, beta: float = 0.1, gamma: float = 0.5, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``(losses, chosen_rewards, rejected_rewards)``, (pairs,) each.

    Args:
        pairs: with means over tokens as scores; there is no reference.
        beta: the factor of rewards.
        gamma: the margin that rewards are to differ by.
        label_smoothing: the part of the labels taken to be wrong.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """
    cpo.check("simpo", "sigmoid", beta, label_smoothing)
    losses = cpo.smoothed(beta * (pairs.chosen - pairs.rejected) - gamma, label_smoothing)
    return losses, beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
