"""Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv:2402.01306): sequences wanted or not, no pairs.

With the reward ``r = beta * (logp - ref_logp)`` of a sequence, ``s`` the logistic function and ``kl`` an estimate of
the divergence of policy and reference, wanted sequences have the loss ``s(beta * kl - r)`` and unwanted ones ``s(r -
beta * kl)``. ``apo_zero_unpaired`` (arXiv:2408.06266) is that without ``kl``. Defaults are
those of TRL's ``KTOConfig``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss import engine
from liger_registry.chunked_loss._checks import (
    at_least_zero,
    check_choice,
    check_flags,
    check_number,
    check_reference,
    check_sequences,
    check_shape,
    either,
    positive,
)
from liger_registry.chunked_loss.head import PLAIN, Head, applied
from liger_registry.errors import InvalidInputError

Tensor = torch.Tensor
LOSS_TYPES = ("kto", "apo_zero_unpaired")


def check(face: str, loss_type: str, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these."""
    check_choice(face, "loss_type", loss_type, LOSS_TYPES)
    check_number(face, "beta", beta, positive, "rewards are multiplied by it", "pass 0.1")
    for name, value in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        check_number(face, name, value, at_least_zero, "losses are multiplied by it", "pass 1.0")


def kl_estimate(policy_logps: Tensor, ref_logps: Tensor) -> Tensor:
    """The divergence of policy and reference, 0-dim and without a graph, from sequences that do not fit their prompts.

    It is the mean of ``policy_logps - ref_logps``, (sequences,) each, and at least 0.
    """
    return (policy_logps - ref_logps).detach().mean().clamp_min(0)


def kto(
    logratios: Tensor,
    wanted: Tensor,
    kl: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """The losses of sequences, (sequences,).

    Args:
        logratios: (sequences,), log-probabilities less those under the reference model.
        wanted: (sequences,), bool.
        kl: 0-dim or (sequences,), the estimate of the divergence.
        beta: the factor of rewards.
        desirable_weight: the factor of wanted sequences' losses.
        undesirable_weight: that of the others.
    """
    reward = beta * (logratios - kl)
    losses = torch.sigmoid(torch.where(wanted, -reward, reward))
    if desirable_weight == undesirable_weight == 1:
        return losses
    return losses * either(wanted, desirable_weight, undesirable_weight, losses.dtype)


def kto_terms(logp: Tensor, constants: Tensor, **settings: Any) -> Tensor:
    """The part that each sequence has in the loss, (sequences,); of those without a token that counts 0.

    Args:
        logp: (1, sequences, tokens).
        constants: (1, sequences, tokens, 5): of sequences the reference's score, whether it is wanted, the divergence
            and its share, of tokens the weights of log-probabilities in the score.
        settings: of ``kto``.
    """
    references, wanted, kl, share = constants[0, :, 0, :4].unbind(-1)
    scores = (logp[0] * constants[0, ..., 4]).sum(-1)
    return kto(scores - references, wanted > 0, kl, **settings) * share


def kto_loss(
    face: str,
    weight: Tensor | nn.Module,
    hidden: Tensor,
    target: Tensor,
    bias: Tensor | None,
    preference_labels: Tensor | None,
    ref_input: Tensor | None,
    ref_weight: Tensor | nn.Module | None,
    ref_bias: Tensor | None,
    kl: Tensor | None,
    *,
    ref_logps: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    use_ref_model: bool = False,
    average_log_prob: bool = False,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    head: Head = PLAIN,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mean over sequences; arguments and metrics as of ``LigerFusedLinearKTOLoss``."""
    check(face, loss_type, beta, desirable_weight, undesirable_weight)
    check_flags(face, use_ref_model=use_ref_model, average_log_prob=average_log_prob)
    check_sequences(face, hidden, target)
    count, tokens = target.shape
    if preference_labels is None:
        raise InvalidInputError(
            f"{face} has no preference_labels",
            why="nothing else says which sequences are wanted",
            fix="pass a bool tensor, one a sequence",
        )
    if kl is not None and loss_type == "apo_zero_unpaired":
        raise InvalidInputError(
            f"kl would do nothing in {face}", why="loss_type='apo_zero_unpaired' has none", fix="leave it out"
        )
    check_shape(face, "preference_labels", preference_labels, (count,))
    check_shape(face, "kl", kl, (), (1,), (count,))
    check_shape(face, "ref_logps", ref_logps, (count,), (count, tokens))
    check_reference(
        face,
        use_ref_model,
        {"ref_input": ref_input, "ref_weight": ref_weight},
        {"ref_bias": ref_bias, "ref_logps": ref_logps},
    )
    hidden, weight, bias = applied(face, hidden, weight, bias)
    told: dict[str, Any] = {"ignore_index": ignore_index, "head": head}
    if ref_input is not None and ref_weight is not None:
        check_sequences(face, ref_input, target, "ref_input's target")
        ref_logps = engine.reference_logps(face, ref_input, ref_weight, target, ref_bias, **told)
    dtype, counted = engine.wide(hidden), target != ignore_index
    weights, lengths = counted.to(dtype), counted.sum(-1)
    if average_log_prob:
        weights = weights / lengths.clamp_min(1)[:, None]
    if ref_logps is not None and ref_logps.dim() == 2:
        ref_logps = torch.where(counted, ref_logps.to(dtype) * weights, 0.0).sum(-1)
    none = weights.new_zeros(count)
    wanted = preference_labels.bool()
    references = none if ref_logps is None else ref_logps.to(dtype)
    divergence = none if kl is None else kl.detach().to(dtype).expand(count)
    share = (lengths > 0).to(dtype) / max(count, 1)
    loss, logp = engine.sequence_loss(
        kto_terms,
        hidden,
        weight,
        target,
        bias,
        weights[..., None],
        torch.stack([references, wanted.to(dtype), divergence, share], -1),
        ways=1,
        settings={"beta": beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight},
        separable=True,
        **told,
    )
    with torch.no_grad():
        scores = (logp * weights).sum(-1)
        sums = engine.logit_sums(hidden, weight, bias)
        rewards = beta * (scores - references)
        metrics = [torch.where(w, x, 0.0).sum() for x in (scores, sums, rewards) for w in (wanted, ~wanted)]
    return loss, tuple(metrics)
