"""Pairs of a chosen and a rejected sequence: what a loss over them is a function of, and what it knows beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from liger_registry.chunked_loss import engine

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """What a loss knows of pairs: (pairs,) each, in fp32 (float64: float64).

    Attributes:
        chosen: the log-probabilities of the chosen sequences: the sum over their tokens that count, or their mean.
        rejected: those of the rejected ones.
        ref_chosen: the chosen ones' under the reference model; 0 if there is none.
        ref_rejected: the rejected ones'.
        chosen_lengths: how many of the chosen sequences' tokens count.
        rejected_lengths: how many of the rejected ones'.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @property
    def chosen_logratios(self) -> Tensor:
        """``chosen - ref_chosen``."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_logratios(self) -> Tensor:
        """``rejected - ref_rejected``."""
        return self.rejected - self.ref_rejected


#: Of sequences that is the reference's score, the number of tokens and the share; the others are of tokens.
SEQUENCE_COLUMNS = 3
#: ``(pairs, **settings)`` to the losses (pairs,), or to a tuple of them and of metrics.
PairLoss = Callable[..., Any]


def pairs_of(logp: Tensor, token_constants: Tensor, sequence_constants: Tensor) -> Pairs:
    """The pairs of log-probabilities (2, pairs, tokens); see ``constants_of``."""
    scores = (logp * token_constants[..., 0]).sum(-1)
    references, lengths = sequence_constants[..., 0], sequence_constants[..., 1]
    return Pairs(scores[0], scores[1], references[0], references[1], lengths[0], lengths[1])


def pair_terms(
    logp: Tensor,
    constants: Tensor,
    *,
    function: str | PairLoss,
    nll_weight: float,
    weighting: bool,
    told: Mapping[str, Any],
) -> Tensor:
    """The part that each pair has in the loss, (pairs,); of pairs without a token that counts 0.

    Args:
        logp: (2, pairs, tokens), the log-probabilities of the chosen and of the rejected sequences; or (3, ...), and
            of those the chosen ones' negative log-likelihood is made of besides.
        constants: those of sequences and those of tokens, see ``constants_of``.
        function: the loss of a ``Pairs``, or where it is to be imported from.
        nll_weight: the factor of the negative log-likelihood.
        weighting: whether pairs are weighted by how likely the policy finds them; see ``LinearPreferenceLoss``.
        told: the function's settings.
    """
    sequences, tokens = constants[..., 0, :SEQUENCE_COLUMNS], constants[..., SEQUENCE_COLUMNS:]
    losses = engine.imported(function)(pairs_of(logp, tokens, sequences), **told)
    losses = losses[0] if isinstance(losses, tuple) else losses
    if weighting:
        counted, lengths = tokens[:2, ..., 2], sequences[:2, :, 1].clamp_min(1)
        aligned = (logp[:2].detach() - tokens[:2, ..., 3]) * counted
        losses = losses * (aligned.sum(-1) / lengths).sum(0).exp()
    share = sequences[0, :, 2]
    losses = torch.where(share == 0, 0.0, losses * share)
    return losses - nll_weight * (logp * tokens[..., 1]).sum((0, 2)) if nll_weight else losses


def constants_of(
    target: Tensor,
    nll_target: Tensor | None,
    references: Tensor | None,
    squares: Tensor | None,
    *,
    ways: int,
    average: bool,
    ld_alpha: float | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What a loss over pairs knows beforehand.

    Args:
        target: (2 * pairs, tokens), chosen sequences first; or (3 * pairs, tokens), see ``preference_loss``.
        nll_target: (pairs, tokens), the targets whose negative log-likelihood is wanted, or None.
        references: (2 * pairs,) or (2 * pairs, tokens), log-probabilities under the reference model.
        squares: (2 * pairs, tokens), of each token the log of the sum of squared probabilities, or None.
        ways: 2 or 3.
        average: whether a sequence's score is the mean of its tokens' log-probabilities, or their sum.
        ld_alpha: the weight of tokens beyond the shorter of both sequences, or None.
        ignore_index: the target of tokens that do not count.
        dtype: of log-probabilities.

    Returns:
        (sequences, tokens, 2 or 4): the weights of log-probabilities in the sequence's score, and in the likelihood;
        with squares which tokens count, and the squares. And (sequences, 3): the reference's score, the number of
        tokens, the pair's share of the loss.
    """
    pairs = target.shape[0] // ways
    counted = target[: 2 * pairs] != ignore_index
    weights, lengths = counted.to(dtype), counted.sum(-1)
    if ld_alpha is not None:
        shared = torch.minimum(lengths[:pairs], lengths[pairs:]).repeat(2)
        weights = torch.where(counted & (counted.cumsum(-1) > shared[:, None]), ld_alpha, weights)
    if average:
        weights = weights / lengths.clamp_min(1)[:, None]
    if references is None:
        references = weights.new_zeros(2 * pairs)
    elif references.dim() == 2:
        references = torch.where(counted, references.to(dtype) * weights, 0.0).sum(-1)
    share = (lengths[:pairs] + lengths[pairs:] > 0).to(dtype) / max(pairs, 1)
    likely = torch.zeros_like(target, dtype=dtype)
    if nll_target is not None:
        wanted = nll_target != ignore_index
        each = wanted.to(dtype) / wanted.sum().clamp_min(1)
        same = nll_target == target[:pairs]
        likely[:pairs] = torch.where(same, each, 0.0)
        if ways == 3:
            likely[2 * pairs :] = torch.where(same, 0.0, each)
    rows = [weights, likely[: 2 * pairs]]
    if squares is not None:
        rows += [counted.to(dtype), squares]
    tokens = torch.stack(rows, -1)
    sequences = torch.stack([references.to(dtype), lengths.to(dtype), share.repeat(2)], -1)
    if ways == 3:
        more = torch.zeros_like(tokens[:pairs])
        more[..., 1] = likely[2 * pairs :]
        tokens, sequences = torch.cat([tokens, more]), torch.cat([sequences, torch.zeros_like(sequences[:pairs])])
    return tokens, sequences
