"""Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290) and its kin, as functions of pairs.

With ``d = beta * (chosen - ref_chosen - rejected + ref_rejected)``, ``c`` and ``r`` the two rewards ``beta * (chosen -
ref_chosen)`` and ``beta * (rejected - ref_rejected)``, ``e`` the label smoothing, ``s`` the logistic function and ``n``
a sequence's length, the losses are

============ ===================================================================== ==================
sigmoid      ``-log s(d)``                                                          arXiv:2305.18290
hinge        ``max(0, 1 - d)``                                                      arXiv:2305.10425
ipo          ``(c / n - r / n - 1 / 2)^2 / beta^2``, scores by token                arXiv:2310.12036
exo_pair     ``s(d) (log s(d) - log(1 - e)) + s(-d) (log s(-d) - log e)``           arXiv:2402.00856
nca_pair     ``-log s(c) - (log s(-c) + log s(-r)) / 2``                            arXiv:2402.05369
robust       ``(-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e)``                      arXiv:2403.00409
bco_pair     ``-log s(c) - log s(-r)``, without its running mean                    arXiv:2404.04656
sppo_hard    ``(c / beta - 1 / (2 beta))^2 + (r / beta + 1 / (2 beta))^2``          arXiv:2405.00675
aot          ``-(1 - e) log s(d) - e log s(-d)`` of ratios sorted over the batch    arXiv:2406.05882
aot_unpaired the same, chosen and rejected ratios sorted apart                      arXiv:2406.05882
apo_zero     ``s(-c) + s(r)``                                                       arXiv:2408.06266
apo_down     ``s(c) + s(-d)``                                                       arXiv:2408.06266
discopop     ``-(1 - m) log s(d) + m exp(-d)`` with ``m = s(d / tau)``              arXiv:2406.08414
sigmoid_norm ``-log s(c / n - r / n)``, scores by token                             arXiv:2411.15124
============ ===================================================================== ==================

Another f-divergence (Wang et al., 2023, arXiv:2309.16240) replaces both log-ratios by ``f'`` of the ratio, in those
losses that depend on their difference alone. Defaults are those of TRL's ``DPOConfig``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import logsigmoid

from liger_registry.chunked_loss._checks import check_choice, check_number, check_unused, positive, share
from liger_registry.chunked_loss.pairs import Pairs
from liger_registry.errors import UnsupportedOptionError

Tensor = torch.Tensor

#: The losses of one pair, which depend on it alone.
SEPARABLE = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
)
#: All of them; ``aot`` sorts over the batch.
LOSS_TYPES = (*SEPARABLE, "aot", "aot_unpaired")
BY_LENGTH = ("ipo", "sigmoid_norm")
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
#: Those of the difference of the log-ratios alone.
BY_DIFFERENCE = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm")
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
#: Beyond this an exponential is cut off, as in TRL.
MOST = 80.0
_DEFAULTS = {"label_smoothing": 0.0, "discopop_tau": 0.05, "f_alpha_divergence_coef": 0.5}


def below_half(value: float) -> bool:
    """Whether less than half of something is meant."""
    return 0 <= value < 0.5


def inside(value: float) -> bool:
    """Whether a number is between 0 and 1."""
    return 0 < value < 1


def check(
    face: str,
    loss_types: Sequence[str],
    beta: float,
    label_smoothing: float,
    discopop_tau: float,
    f_divergence_type: str,
    f_alpha_divergence_coef: float,
) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these, or would not read one of them."""
    for name in loss_types:
        check_choice(face, "loss_type", name, LOSS_TYPES)
    check_choice(face, "f_divergence_type", f_divergence_type, F_DIVERGENCES)
    check_number(face, "beta", beta, positive, "rewards are multiplied by it", "pass 0.1")
    check_number(face, "discopop_tau", discopop_tau, positive, "it divides", "pass 0.05")
    used = [
        *(["label_smoothing"] if set(loss_types) & set(SMOOTHED) else []),
        *(["discopop_tau"] if "discopop" in loss_types else []),
        *(["f_alpha_divergence_coef"] if f_divergence_type == "alpha_divergence" else []),
    ]
    given = {
        "label_smoothing": label_smoothing,
        "discopop_tau": discopop_tau,
        "f_alpha_divergence_coef": f_alpha_divergence_coef,
    }
    check_unused(
        face, given, _DEFAULTS, used, f"loss_type={', '.join(loss_types)}, f_divergence_type={f_divergence_type}"
    )
    why = "it is the part of the labels that are flipped, for 'robust' less than half"
    check_number(
        face, "label_smoothing", label_smoothing, below_half if "robust" in loss_types else share, why, "pass 0.1"
    )
    if "exo_pair" in loss_types:
        check_number(face, "label_smoothing", label_smoothing, inside, "'exo_pair' takes its logarithm", "pass 1e-3")
    others = [name for name in loss_types if name not in BY_DIFFERENCE]
    if f_divergence_type != "reverse_kl" and others:
        raise UnsupportedOptionError(
            f"f_divergence_type={f_divergence_type!r} of {face} does not go with loss_type={others[0]!r}",
            why="that is no function of the difference of the rewards",
            candidates=BY_DIFFERENCE,
            fix="leave f_divergence_type at 'reverse_kl'",
        )


def score(logratios: Tensor, f_divergence_type: str, f_alpha_divergence_coef: float) -> Tensor:
    """``f'`` of the ratio ``exp(logratios)``, up to a constant."""
    if f_divergence_type == "forward_kl":
        return -torch.expm1((-logratios).clamp_max(MOST))
    if f_divergence_type == "js_divergence":
        return math.log(2.0) + logsigmoid(logratios)
    power = f_alpha_divergence_coef - 1.0
    if f_divergence_type == "alpha_divergence" and abs(power) >= 1e-6:
        return torch.expm1((logratios * power).clamp_max(MOST)) / power
    return logratios


def dpo(
    pairs: Pairs,
    *,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(losses, chosen_rewards, rejected_rewards)``, (pairs,) each.

    Args:
        pairs: with sums over tokens as scores.
        loss_type: one of ``LOSS_TYPES``, or several, whose sum the loss is.
        loss_weights: of several, 1 each by default.
        beta: the factor of rewards; for ``ipo`` and ``sppo_hard`` the regularisation.
        label_smoothing: the part of the labels taken to be wrong, for ``robust``, ``aot`` and ``aot_unpaired``; for
            ``exo_pair`` the probability of the rejected sequence.
        discopop_tau: for ``discopop``.
        f_divergence_type: ``reverse_kl``, ``forward_kl``, ``js_divergence`` or ``alpha_divergence``.
        f_alpha_divergence_coef: for the last.

    Raises:
        UnsupportedOptionError: a value that is not supported, or that nothing would read.
    """
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    factors = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    check("dpo", names, beta, label_smoothing, discopop_tau, f_divergence_type, f_alpha_divergence_coef)
    check_weights("dpo", names, factors)
    chosen, rejected = (
        score(ratios, f_divergence_type, f_alpha_divergence_coef)
        for ratios in (pairs.chosen_logratios, pairs.rejected_logratios)
    )
    total: Tensor | None = None
    for name, factor in zip(names, factors, strict=True):
        losses = _losses(name, pairs, chosen, rejected, beta, label_smoothing, discopop_tau)
        losses = losses if factor == 1 else losses * factor
        total = losses if total is None else total + losses
    assert total is not None
    return total, beta * pairs.chosen_logratios.detach(), beta * pairs.rejected_logratios.detach()


def check_weights(face: str, loss_types: Sequence[str], loss_weights: Sequence[float]) -> None:
    """Raise UnsupportedOptionError unless each loss has a weight, and there is one."""
    if len(loss_types) != len(loss_weights) or not loss_types:
        raise UnsupportedOptionError(
            f"{face} got {len(loss_types)} loss types and {len(loss_weights)} weights",
            why="there must be a loss, and one weight for each",
            fix="pass loss_weights of the length of loss_type, or leave them out",
        )


def _losses(
    name: str, pairs: Pairs, chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, tau: float
) -> Tensor:
    difference = beta * (chosen - rejected)
    reward, other = beta * pairs.chosen_logratios, beta * pairs.rejected_logratios
    if name == "sigmoid":
        return -logsigmoid(difference)
    if name == "hinge":
        return torch.relu(1 - difference)
    if name in BY_LENGTH:
        gap = chosen / pairs.chosen_lengths.clamp_min(1) - rejected / pairs.rejected_lengths.clamp_min(1)
        return (gap - 1 / (2 * beta)).square() if name == "ipo" else -logsigmoid(beta * gap)
    if name == "exo_pair":
        right, wrong = logsigmoid(difference), logsigmoid(-difference)
        return right.exp() * (right - math.log1p(-smoothing)) + wrong.exp() * (wrong - math.log(smoothing))
    if name == "nca_pair":
        return -logsigmoid(reward) - 0.5 * logsigmoid(-reward) - 0.5 * logsigmoid(-other)
    if name == "robust":
        kept, flipped = (1 - smoothing) * logsigmoid(difference), smoothing * logsigmoid(-difference)
        return (flipped - kept) / (1 - 2 * smoothing)
    if name == "bco_pair":
        return -logsigmoid(reward) - logsigmoid(-other)
    if name == "sppo_hard":
        return (pairs.chosen_logratios - 0.5 / beta).square() + (pairs.rejected_logratios + 0.5 / beta).square()
    if name == "apo_zero":
        return torch.sigmoid(-reward) + torch.sigmoid(other)
    if name == "apo_down":
        return torch.sigmoid(reward) + torch.sigmoid(-difference)
    if name == "discopop":
        share = difference / tau
        # exp(-d) * s(d / tau) as one exponential: apart they are infinity times 0 for a large negative difference.
        return -logsigmoid(difference) * torch.sigmoid(-share) + (logsigmoid(share) - difference).exp()
    first, second = (
        (pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
        if name == "aot"
        else (pairs.chosen_logratios, pairs.rejected_logratios)
    )
    gap = beta * _sorted_gap(first, second, pairs.chosen_lengths + pairs.rejected_lengths == 0)
    return -logsigmoid(gap) * (1 - smoothing) - logsigmoid(-gap) * smoothing


def _sorted_gap(first: Tensor, second: Tensor, empty: Tensor) -> Tensor:
    """The differences of both in order, (pairs,), each where the first of the two stands.

    Pairs without a token that counts come last in both, so that they are compared with each other alone.
    """
    most = torch.finfo(first.dtype).max
    values, order = first.masked_fill(empty, most).sort()
    return torch.zeros_like(values).scatter(0, order, values - second.masked_fill(empty, most).sort().values)
