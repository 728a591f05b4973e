"""Losses over pairs of a chosen and a rejected sequence, and the way to one's own.

A loss is a function of a ``Pairs``; everything else (log-probabilities without logits, the reference model, masks,
averages, the negative log-likelihood, metrics) is done around it. One's own needs no change in this package::

    import torch
    from liger_registry.chunked_loss import LinearPreferenceLoss, Pairs

    def margin(pairs: Pairs, beta: float = 0.1, width: float = 1.0) -> torch.Tensor:
        gap = (pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected)
        return torch.relu(width - beta * gap)

    loss_function = LinearPreferenceLoss(margin, use_ref_model=True, separable=True, beta=0.5)
    loss, metrics = loss_function(head.weight, hidden, target, ref_input=ref_hidden, ref_weight=ref_head.weight)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss import engine
from liger_registry.chunked_loss._checks import check_flags, check_pairs, check_reference, check_sequences, check_shape
from liger_registry.chunked_loss.head import PLAIN, Head, applied
from liger_registry.chunked_loss.pairs import PairLoss, constants_of, pair_terms, pairs_of

Tensor = torch.Tensor
#: ``(loss, metrics)``.
Result = tuple[Tensor, tuple[Tensor, ...]]


def preference_loss(
    face: str,
    function: PairLoss,
    settings: Mapping[str, Any],
    weight: Tensor | nn.Module,
    hidden: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | nn.Module | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    nll_target: Tensor | None = None,
    use_ref_model: bool = False,
    compute_nll_loss: bool = False,
    alpha: float = 1.0,
    average_log_prob: bool = False,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    separable: bool = False,
    ignore_index: int = -100,
    head: Head = PLAIN,
) -> Result:
    """The mean over pairs of a function of their log-probabilities; arguments as of ``LinearPreferenceLoss``.

    Where the likelihood is of other targets than the loss, the chosen sequences take part a third time, with those
    targets that differ: only tokens that count cost anything where others are dropped.
    """
    check_flags(face, use_ref_model=use_ref_model, compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob)
    check_sequences(face, hidden, target)
    check_pairs(face, target)
    check_reference(
        face,
        use_ref_model,
        {"ref_input": ref_input, "ref_weight": ref_weight},
        {"ref_bias": ref_bias, "ref_logps": ref_logps},
    )
    pairs, tokens = target.shape[0] // 2, target.shape[1]
    check_shape(face, "ref_logps", ref_logps, (2 * pairs,), (2 * pairs, tokens))
    check_shape(face, "nll_target", nll_target, (pairs, tokens), (2 * pairs, tokens))
    hidden, weight, bias = applied(face, hidden, weight, bias)
    told: dict[str, Any] = {"ignore_index": ignore_index, "head": head}
    if ref_input is not None and ref_weight is not None:
        check_sequences(face, ref_input, target)
        ref_logps = engine.reference_logps(face, ref_input, ref_weight, target, ref_bias, **told)
    squares = engine.log_sum_squares(hidden, weight, target, bias, **told) if use_weighting else None
    likely = None
    states, labels, ways = hidden, target, 2
    if compute_nll_loss:
        likely = target[:pairs] if nll_target is None else nll_target[:pairs]
        if nll_target is not None:
            extra = torch.where(likely == target[:pairs], ignore_index, likely)
            states, labels, ways = torch.cat([hidden, hidden[:pairs]]), torch.cat([target, extra]), 3
    constants = constants_of(
        labels,
        likely,
        ref_logps,
        squares,
        ways=ways,
        average=average_log_prob,
        ld_alpha=ld_alpha,
        ignore_index=ignore_index,
        dtype=engine.wide(hidden),
    )
    loss, logp = engine.sequence_loss(
        pair_terms,
        states,
        weight,
        labels,
        bias,
        *constants,
        ways=ways,
        settings={
            "function": function,
            "nll_weight": float(alpha) if compute_nll_loss else 0.0,
            "weighting": use_weighting,
            "told": dict(settings),
        },
        separable=separable,
        **told,
    )
    return loss, _metrics(function, settings, logp, constants, ways, engine.logit_sums(hidden, weight, bias), weight)


@torch.no_grad()
def _metrics(
    function: PairLoss,
    settings: Mapping[str, Any],
    logp: Tensor,
    constants: tuple[Tensor, Tensor],
    ways: int,
    sums: Tensor,
    weight: Tensor,
) -> tuple[Tensor, ...]:
    """The scores of both kinds of sequences, the means of their logits, the likelihood, and the function's own."""
    logp, tokens, sequences = (engine.grouped(t, ways) for t in (logp, *constants))
    pairs = pairs_of(logp, tokens, sequences)
    found = function(pairs, **settings)
    more = found[1:] if isinstance(found, tuple) else ()
    count = max(pairs.chosen.shape[0] * logp.shape[-1] * weight.shape[0], 1)
    chosen, rejected = engine.grouped(sums, 2).sum(-1) / count
    return pairs.chosen, pairs.rejected, chosen, rejected, -(logp * tokens[..., 1]).sum(), *more


class LinearPreferenceLoss(nn.Module):
    """A loss over pairs of a user's own.

    Args:
        function: ``(pairs, **settings)`` to the losses of pairs, (pairs,), or to a tuple of them and of metrics. It is
            called with ``Pairs``, under autograd.
        use_ref_model: whether there is a reference.
        compute_nll_loss: whether the chosen sequences' negative log-likelihood, a mean over tokens, is added.
        alpha: its factor.
        average_log_prob: whether a sequence's score is the mean of its tokens' log-probabilities, or their sum.
        ld_alpha: the weight of tokens beyond the shorter of both sequences (LD-DPO, arXiv:2409.06411); None for 1.
        use_weighting: whether each pair's loss is multiplied by how likely the policy finds both sequences, through
            which no gradient flows (WPO, arXiv:2406.11827, equation 2). Costs two products more.
        separable: whether each pair's loss depends on that pair alone. Gradients may then be computed while a pair's
            logits are there, in three products instead of four, if the function can be imported by its name and its
            settings are numbers, texts and lists of them.
        ignore_index: the target of tokens that do not count.
        head: how logits are made.
        settings: keyword arguments of the function.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        function: PairLoss,
        *,
        use_ref_model: bool = False,
        compute_nll_loss: bool = False,
        alpha: float = 1.0,
        average_log_prob: bool = False,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        separable: bool = False,
        ignore_index: int = -100,
        head: Head = PLAIN,
        **settings: Any,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_flags(face, use_weighting=use_weighting, separable=separable)
        self.function = function
        self.use_ref_model = use_ref_model
        self.compute_nll_loss = compute_nll_loss
        self.alpha = alpha
        self.average_log_prob = average_log_prob
        self.ld_alpha = ld_alpha
        self.use_weighting = use_weighting
        self.separable = separable
        self.ignore_index = ignore_index
        self.head = head
        self.settings = settings

    def forward(
        self,
        lin_weight: Tensor | nn.Module,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | nn.Module | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> Result:
        """``(loss, metrics)``.

        Metrics are the scores of the chosen and the rejected sequences, (pairs,) each, the means of their logits, the
        negative log-likelihood, and the function's own.

        Args:
            lin_weight: (vocab, hidden), the head's; or the head.
            _input: (2 * pairs, tokens, hidden), chosen sequences first.
            target: (2 * pairs, tokens), int64.
            bias: (vocab,), or None.
            ref_input: the reference model's hidden states, of any width.
            ref_weight: its head's weight, or its head.
            ref_bias: (vocab,), or None.
            ref_logps: in place of these, log-probabilities that were computed before: of sequences, made as scores
                are, (2 * pairs,), or of tokens, (2 * pairs, tokens).
            nll_target: (pairs, tokens), or (2 * pairs, tokens) of which the first half counts: targets of the
                likelihood, where they are others.

        Raises:
            InvalidInputError: shapes that do not fit, an odd number of sequences, or a reference that is missing.
        """
        return preference_loss(
            type(self).__name__,
            self.function,
            self.settings,
            lin_weight,
            _input,
            target,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            ref_logps=ref_logps,
            nll_target=nll_target,
            use_ref_model=self.use_ref_model,
            compute_nll_loss=self.compute_nll_loss,
            alpha=self.alpha,
            average_log_prob=self.average_log_prob,
            ld_alpha=self.ld_alpha,
            use_weighting=self.use_weighting,
            separable=self.separable,
            ignore_index=self.ignore_index,
            head=self.head,
        )
