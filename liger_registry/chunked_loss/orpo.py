"""Odds ratio preference optimisation (Hong et al., 2024, arXiv:2403.07691) as a function of pairs.

``-beta * log s(log odds(chosen) - log odds(rejected))`` with ``odds(p) = p / (1 - p)``, of means over tokens.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid

from liger_registry.chunked_loss.pairs import Pairs

Tensor = torch.Tensor


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x < 0, finite with finite gradients, which a probability of 1 is the limit of."""
    x = x.clamp_max(-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2.0)
    # The branch that is not taken must not be infinite either: its gradient of 0 would be times infinity.
    small, large = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))


def orpo(pairs: Pairs, *, beta: float = 0.1) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(losses, chosen_rewards, rejected_rewards, log_odds_ratio, log_odds_chosen)``.

    The first three are (pairs,), the others means over pairs: of ``log s(log odds)``, and of the log odds. Pairs in
    which either sequence has no token that counts have no odds, and a loss of 0.

    Args:
        pairs: with means over tokens as scores; there is no reference.
        beta: the factor of the loss, lambda in the paper.
    """
    empty = (pairs.chosen_lengths == 0) | (pairs.rejected_lengths == 0)
    chosen, rejected = (x.masked_fill(empty, -1.0) for x in (pairs.chosen, pairs.rejected))
    odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    ratio = logsigmoid(odds).masked_fill(empty, 0.0)
    count = max(ratio.shape[0], 1)
    rewards = beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
    return -beta * ratio, *rewards, ratio.detach().sum() / count, odds.detach().sum() / count
