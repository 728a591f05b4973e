"""Direct preference optimisation and its kin over an output head, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss import dpo as losses
from liger_registry.chunked_loss._checks import check_chunking, check_flags, check_number, check_unused, share
from liger_registry.chunked_loss.head import PLAIN, Head
from liger_registry.chunked_loss.preference import Result, preference_loss
from liger_registry.errors import UnsupportedOptionError

Tensor = torch.Tensor
#: TRL's name for the negative log-likelihood of the chosen sequences, as one of several losses.
SFT = "sft"


def dpo_loss(
    face: str,
    weight: Tensor | nn.Module,
    hidden: Tensor,
    target: Tensor,
    *others: Any,
    ref_logps: Tensor | None = None,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    compute_nll_loss: bool = False,
    alpha: float = 1.0,
    average_log_prob: bool = False,
    use_weighting: bool = False,
    ignore_index: int = -100,
    use_ref_model: bool = True,
    ld_alpha: float | None = None,
    head: Head = PLAIN,
    **settings: Any,
) -> Result:
    """The loss and its metrics; arguments as of ``LigerFusedLinearDPOLoss``, ``others`` being bias and reference."""
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    factors = [1.0] * len(names) if loss_weights is None else [float(w) for w in loss_weights]
    check(face, names, factors, compute_nll_loss, alpha, average_log_prob, use_weighting, ld_alpha, settings)
    pairs = [(name, factor) for name, factor in zip(names, factors, strict=True) if name != SFT]
    likely = (alpha if compute_nll_loss else 0.0) + sum(
        f for name, f in zip(names, factors, strict=True) if name == SFT
    )
    told = {**settings, "loss_type": [name for name, _ in pairs], "loss_weights": [factor for _, factor in pairs]}
    return preference_loss(
        face,
        losses.dpo if pairs else nothing,
        told if pairs else {"beta": settings.get("beta", 0.1)},
        weight,
        hidden,
        target,
        *others,
        ref_logps=ref_logps,
        use_ref_model=use_ref_model,
        compute_nll_loss=compute_nll_loss or SFT in names,
        alpha=likely,
        average_log_prob=average_log_prob,
        ld_alpha=ld_alpha,
        use_weighting=use_weighting,
        separable=all(name in losses.SEPARABLE for name, _ in pairs),
        ignore_index=ignore_index,
        head=head,
    )


def nothing(pairs: Any, *, beta: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    """No loss of pairs, and their rewards."""
    rewards = beta * pairs.chosen_logratios.detach(), beta * pairs.rejected_logratios.detach()
    return torch.zeros_like(pairs.chosen), *rewards


def check(
    face: str,
    names: Sequence[str],
    factors: Sequence[float],
    compute_nll_loss: bool,
    alpha: float,
    average_log_prob: bool,
    use_weighting: bool,
    ld_alpha: float | None,
    settings: dict[str, Any],
) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these, or would not read one of them."""
    losses.check_weights(face, names, factors)
    check_flags(face, compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob, use_weighting=use_weighting)
    usual = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "discopop_tau": 0.05,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
    }
    losses.check(face, [name for name in names if name != SFT], **{**usual, **settings})
    used = ["alpha"] if compute_nll_loss else []
    check_unused(face, {"alpha": alpha}, {"alpha": 1.0}, used, "compute_nll_loss=False")
    if ld_alpha is not None:
        check_number(face, "ld_alpha", ld_alpha, share, "it is a weight of tokens", "pass None for 1")
    by_length = [name for name in names if name in losses.BY_LENGTH]
    if average_log_prob and by_length:
        raise UnsupportedOptionError(
            f"average_log_prob=True of {face} does not go with loss_type={by_length[0]!r}",
            why="that divides by the lengths itself",
            fix="leave average_log_prob out",
        )
    without = [name for name in names if name in ("aot", "aot_unpaired", SFT)]
    if use_weighting and without:
        raise UnsupportedOptionError(
            f"use_weighting=True of {face} does not go with loss_type={without[0]!r}",
            why="it weights pairs, and that has none of its own",
            fix="leave use_weighting out",
        )


class LigerFusedLinearDPOLoss(nn.Module):
    """Direct preference optimisation over an output head, without (tokens, vocab) of logits.

    Args:
        ignore_index: the target of tokens that do not count.
        beta: the factor of rewards.
        alpha: the factor of the chosen sequences' negative log-likelihood.
        compute_nll_loss: whether that is added.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        use_ref_model: whether there is a reference model.
        average_log_prob: whether a sequence's score is the mean of its tokens' log-probabilities, or their sum.
        chunk_size: without effect; how much is computed at once is chosen by memory.
        loss_type: one of ``dpo.LOSS_TYPES``, or ``sft`` for the negative log-likelihood, or several of them.
        label_smoothing: see ``dpo.dpo``.
        discopop_tau: see there.
        loss_weights: of several losses, 1 each by default.
        f_divergence_type: see there.
        f_alpha_divergence_coef: see there.
        ld_alpha: see ``LinearPreferenceLoss``.
        use_weighting: see there.
        head: how logits are made.

    Raises:
        UnsupportedOptionError: a value that is not supported, or that nothing would read.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str | Sequence[str] = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        loss_weights: Sequence[float] | None = None,
        f_divergence_type: str = "reverse_kl",
        f_alpha_divergence_coef: float = 0.5,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        head: Head = PLAIN,
    ) -> None:
        super().__init__()
        check_chunking(type(self).__name__, compiled, chunk_size)
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.discopop_tau = discopop_tau
        self.loss_weights = loss_weights
        self.f_divergence_type = f_divergence_type
        self.f_alpha_divergence_coef = f_alpha_divergence_coef
        self.ld_alpha = ld_alpha
        self.use_weighting = use_weighting
        self.head = head
        names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
        factors = [1.0] * len(names) if loss_weights is None else list(loss_weights)
        extra = (compute_nll_loss, alpha, average_log_prob, use_weighting, ld_alpha)
        check(type(self).__name__, names, factors, *extra, self._settings())

    def _settings(self) -> dict[str, Any]:
        names = ("beta", "label_smoothing", "discopop_tau", "f_divergence_type", "f_alpha_divergence_coef")
        return {name: getattr(self, name) for name in names}

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
    ) -> Result:
        """``(loss, metrics)``.

        Metrics are the log-probabilities of the chosen and of the rejected sequences, (pairs,) each, the means of their
        logits, the chosen ones' negative log-likelihood (0 if it is not computed), and both rewards, (pairs,) each.

        Args:
            lin_weight: (vocab, hidden), the head's; or the head.
            _input: (2 * pairs, tokens, hidden), chosen sequences first.
            target: (2 * pairs, tokens), int64.
            bias: (vocab,), or None.
            ref_input: the reference model's hidden states, of any width.
            ref_weight: its head's weight, or its head.
            ref_bias: (vocab,), or None.
            ref_logps: in place of these, log-probabilities that were computed before: of sequences, (2 * pairs,), or of
                tokens, (2 * pairs, tokens).

        Raises:
            InvalidInputError: shapes that do not fit, an odd number of sequences, or a reference that is missing.
        """
        return dpo_loss(
            type(self).__name__,
            lin_weight,
            _input,
            target,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            ref_logps=ref_logps,
            loss_type=self.loss_type,
            loss_weights=self.loss_weights,
            compute_nll_loss=self.compute_nll_loss,
            alpha=self.alpha,
            average_log_prob=self.average_log_prob,
            use_weighting=self.use_weighting,
            ignore_index=self.ignore_index,
            use_ref_model=self.use_ref_model,
            ld_alpha=self.ld_alpha,
            head=self.head,
            **self._settings(),
        )
