"""Group relative policy optimisation (Shao et al., 2024, arXiv:2402.03300) and its kin, as functions of tokens.

Each token has the ratio ``w`` of its probability to that under the policy that sampled it, or its sequence has the
geometric mean of them (GSPO, arXiv:2507.18071), and an advantage ``A``. The losses of tokens are

======= ========================================================================== ================
grpo    ``-min(min(w, delta) A, clip(w, 1 - low, 1 + high) A)``                    arXiv:2402.03300
cispo   ``-min(w, high) A logp``, no gradient through the minimum                  arXiv:2506.13585
sapo    ``-4 / t * s(t (w - 1)) A``, t by the sign of A                            arXiv:2511.20347
vespo   ``-phi(W) A logp``, ``phi`` of the sequence's ratio, no gradient through it arXiv:2602.10693
======= ========================================================================== ================

to which ``beta`` times an estimate of the divergence from the reference is added, ``exp(q) - q - 1`` with ``q`` the
log-ratio of reference to policy. They are summed over a sequence's tokens and sequences, divided by each sequence's
length and the number of sequences (``grpo``, ``sapo``), by the number of tokens (``bnpo``), by the number of sequences
times a length (``dr_grpo``, arXiv:2503.20783), by the tokens of the whole batch over all processes (``dapo``,
arXiv:2503.14476, ``cispo``, ``vespo``), or by the number of sequences (``luspo``, arXiv:2602.05261). Where a token does
not count nothing it has is read. Defaults are those of TRL's ``GRPOConfig``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from liger_registry.chunked_loss._checks import (
    at_least_zero,
    check_choice,
    check_number,
    check_unused,
    either,
    positive,
)
from liger_registry.errors import UnsupportedOptionError

Tensor = torch.Tensor
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
BY_BATCH = ("dapo", "cispo", "vespo")
LEVELS = ("token", "sequence")
#: Log-ratios are cut off here before ``vespo`` makes weights of them, as in TRL.
LEAST, MOST = math.log(1e-8), 20.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How tokens become losses; see the module.

    Attributes:
        loss_type: one of ``LOSS_TYPES``.
        importance_sampling_level: ``token`` or ``sequence``.
        beta: the factor of the divergence.
        epsilon_low: how far a ratio may fall below 1.
        epsilon_high: how far it may rise above; for ``cispo`` the largest.
        delta: the largest ratio of a token with a negative advantage (INTELLECT-2), None for none.
        use_bias_correction_kl: whether the divergence is multiplied by the ratio.
        sapo_temperature_pos: for ``sapo``, where the advantage is above 0.
        sapo_temperature_neg: where it is not.
        vespo_k_pos: for ``vespo``, the exponent where the advantage is not negative.
        vespo_lambda_pos: the rate.
        vespo_k_neg: the exponent where it is.
        vespo_lambda_neg: the rate.

    Raises:
        UnsupportedOptionError: a value that is not supported, or that nothing would read.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    beta: float = 0.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def check(self, face: str) -> None:
        """Raise UnsupportedOptionError if a loss cannot be made with these, or would not read one of them."""
        kind, level = self.loss_type, self.importance_sampling_level
        check_choice(face, "loss_type", kind, LOSS_TYPES)
        check_choice(face, "importance_sampling_level", level, LEVELS)
        check_choice(face, "use_bias_correction_kl", self.use_bias_correction_kl, (True, False))
        if level == "sequence" and kind not in CLIPPED:
            raise UnsupportedOptionError(
                f"importance_sampling_level='sequence' of {face} does not go with loss_type={kind!r}",
                why="it weights tokens" if kind != "vespo" else "its weights are those of sequences already",
                candidates=CLIPPED,
                fix="pass importance_sampling_level='token'",
            )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            check_number(face, name, getattr(self, name), positive, "it divides", "pass 1.0")
        if self.delta is not None:
            check_number(face, "delta", self.delta, positive, "it bounds ratios", "pass None for no bound")
        for name in ("beta", "epsilon_low", "epsilon_high"):
            check_number(face, name, getattr(self, name), at_least_zero, "it is a size", "pass 0.2")
        names = ["epsilon_low", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg"]
        names += ["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"]
        used = {
            "cispo": ["epsilon_high"],
            "sapo": ["sapo_temperature_pos", "sapo_temperature_neg"],
            "vespo": [name for name in names if name.startswith("vespo")],
        }.get(kind, ["epsilon_low", "epsilon_high", "delta"])
        defaults = Policy()
        given, usual = ({name: getattr(p, name) for name in names} for p in (self, defaults))
        check_unused(face, given, usual, used, f"loss_type={kind!r}")


#: The options of a policy.
NAMES = tuple(field.name for field in fields(Policy))


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of tokens beforehand, each (sequences, tokens) in the dtype of log-probabilities.

    Attributes:
        mask: the weight of tokens in the loss; those of 0 do not count.
        advantages: (sequences, 1), or of tokens.
        old_logps: log-probabilities under the policy that sampled them; None for the present ones.
        ref_logps: under the reference model; None for the present ones.
        ratio: a factor on the loss that corrects for who sampled them, or (sequences, 1); None for 1.
    """

    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    ratio: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """Which tokens count, bool."""
        return self.mask != 0

    @property
    def lengths(self) -> Tensor:
        """(sequences, 1), the sum of the mask, at least 1."""
        return self.mask.sum(-1, keepdim=True).clamp_min(1.0)

    def difference(self, logp: Tensor, other: Tensor | None) -> Tensor:
        """``logp - other`` where tokens count, else 0; without another the same without its value."""
        return torch.where(self.counted, logp - (logp.detach() if other is None else other), 0.0)


def log_weights(logp: Tensor, tokens: Tokens, policy: Policy) -> tuple[Tensor, Tensor]:
    """The log-ratios of tokens, and those that the level asks for, which for sequences are (sequences, 1)."""
    ratios = tokens.difference(logp, tokens.old_logps)
    if policy.importance_sampling_level == "token":
        return ratios, ratios
    return ratios, (ratios * tokens.mask).sum(-1, keepdim=True) / tokens.lengths


def divergence(logp: Tensor, tokens: Tokens, policy: Policy, weights: Tensor) -> Tensor:
    """Each token's estimate of the divergence from the reference."""
    gap = -tokens.difference(logp, tokens.ref_logps)
    found = torch.expm1(gap) - gap
    return found * weights.exp() if policy.use_bias_correction_kl else found


def token_losses(logp: Tensor, tokens: Tokens, policy: Policy) -> Tensor:
    """The losses of tokens, (sequences, tokens) or, where all of a sequence have one, (sequences, 1).

    Args:
        logp: (sequences, tokens), log-probabilities; those of tokens that do not count are not read.
        tokens: what is known of them.
        policy: how they become losses.
    """
    ratios, weights = log_weights(logp, tokens, policy)
    advantages, kind = tokens.advantages, policy.loss_type
    if kind == "cispo":
        losses = -weights.exp().clamp_max(policy.epsilon_high).detach() * advantages * logp
    elif kind == "sapo":
        positive, negative = policy.sapo_temperature_pos, policy.sapo_temperature_neg
        temperature = either(advantages > 0, positive, negative, logp.dtype)
        losses = -torch.sigmoid(temperature * torch.expm1(weights)) * (4 / temperature) * advantages
    elif kind == "vespo":
        losses = -sequence_weights(ratios, tokens, policy) * advantages * logp
    else:
        own = weights.exp()
        clipped = own.clamp(1 - policy.epsilon_low, 1 + policy.epsilon_high)
        own = own if policy.delta is None else own.clamp_max(policy.delta)
        losses = -torch.minimum(own * advantages, clipped * advantages)
    if tokens.ratio is not None and kind != "vespo":
        losses = losses * tokens.ratio
    if policy.beta:
        losses = losses + policy.beta * divergence(logp, tokens, policy, weights)
    return losses


@torch.no_grad()
def sequence_weights(ratios: Tensor, tokens: Tokens, policy: Policy) -> Tensor:
    """``phi(W) = exp(l (1 - W)) W^k``, 1 at W = 1, of the product of a sequence's ratios; (sequences, 1)."""
    total = (ratios.clamp(-MOST, MOST) * tokens.mask).sum(-1, keepdim=True)
    if tokens.ratio is not None:
        more = tokens.ratio.log().clamp(LEAST, MOST)
        total = total + (more if more.shape[-1] == 1 else torch.where(tokens.counted, more, 0.0).sum(-1, keepdim=True))
    total = total.clamp(LEAST, MOST)
    good = tokens.advantages >= 0
    power = either(good, policy.vespo_k_pos, policy.vespo_k_neg, ratios.dtype)
    rate = either(good, policy.vespo_lambda_pos, policy.vespo_lambda_neg, ratios.dtype).clamp_min(1e-4)
    weights = (power * total - rate * torch.expm1(total)).exp()
    return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).to(ratios.dtype)


@torch.no_grad()
def metrics(logp: Tensor, tokens: Tokens, policy: Policy) -> tuple[Tensor, ...]:
    """Means over tokens that count: of the divergence, if it is in the loss, and of which ratios were clipped."""
    _, weights = log_weights(logp, tokens, policy)
    count = tokens.mask.sum().clamp_min(1.0)
    found = []
    if policy.beta:
        found.append((divergence(logp, tokens, policy, weights) * tokens.mask).sum() / count)
    own = weights.exp()
    low, high = 1 - policy.epsilon_low, 1 + policy.epsilon_high
    if policy.loss_type == "cispo":
        low, high = -math.inf, policy.epsilon_high
    elif policy.loss_type not in CLIPPED:
        low, high = -math.inf, math.inf
    clipped = ((own < low) & (tokens.advantages < 0)) | ((own > high) & (tokens.advantages > 0))
    found.append((clipped * tokens.mask).sum() / count)
    return tuple(found)
