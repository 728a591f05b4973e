"""DPO and its kin: every loss type and option against the papers' formulas in float64, values and gradients."""

from __future__ import annotations

import math

import preference as p
import pytest
import torch

from liger_registry.chunked_loss import LigerFusedLinearDPOLoss
from liger_registry.chunked_loss.dpo import BY_DIFFERENCE, LOSS_TYPES, SMOOTHED
from liger_registry.errors import UnsupportedOptionError

BETA = 0.2


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def losses(kind, c, r, rc, rr, nc, nr, beta=BETA, e=0.0, tau=0.05, divergence=lambda x: x):
    """The losses of pairs from four log-probabilities and two lengths, straight from the formulas."""
    u, v = divergence(c - rc), divergence(r - rr)
    d, a, b = beta * (u - v), beta * (c - rc), beta * (r - rr)

    def smooth(x):
        return -(1 - e) * torch.log(sigma(x)) - e * torch.log(sigma(-x))

    return {
        "sigmoid": lambda: -torch.log(sigma(d)),
        "hinge": lambda: torch.clamp(1 - d, min=0),
        "ipo": lambda: (u / nc - v / nr - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -torch.log(sigma(beta * (u / nc - v / nr))),
        "exo_pair": lambda: (
            sigma(d) * (torch.log(sigma(d)) - math.log(1 - e)) + sigma(-d) * (torch.log(sigma(-d)) - math.log(e))
        ),
        "nca_pair": lambda: -torch.log(sigma(a)) - torch.log(sigma(-a)) / 2 - torch.log(sigma(-b)) / 2,
        "robust": lambda: (-(1 - e) * torch.log(sigma(d)) + e * torch.log(sigma(-d))) / (1 - 2 * e),
        "bco_pair": lambda: -torch.log(sigma(a)) - torch.log(sigma(-b)),
        "sppo_hard": lambda: (c - rc - 0.5 / beta) ** 2 + (r - rr + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - sigma(a) + sigma(b),
        "apo_down": lambda: sigma(a) + 1 - sigma(d),
        "discopop": lambda: -(1 - sigma(d / tau)) * torch.log(sigma(d)) + sigma(d / tau) * torch.exp(-d),
        "aot": lambda: smooth(beta * ((c - r).sort().values - (rc - rr).sort().values)),
        "aot_unpaired": lambda: smooth(beta * ((c - rc).sort().values - (r - rr).sort().values)),
    }[kind]()


def right(m, kinds, weights=(1.0,), average=False, alpha=0.0, reference=True, likelihood=False, weighting=None, **told):
    """Loss and metrics with all logits there."""
    tokens = p.logps(m.hidden, m.weight, m.bias, m.target)
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
    refs = refs if reference else torch.zeros_like(refs)
    if weighting is not None:
        tokens, refs = tokens * weighting, refs * weighting
    (c, r), (rc, rr) = p.scores(tokens, m.target, average).chunk(2), p.scores(refs, m.target, average).chunk(2)
    nc, nr = (m.target != p.IGNORED).sum(-1).chunk(2)
    total = sum(w * losses(k, c, r, rc, rr, nc, nr, **told).mean() for k, w in zip(kinds, weights, strict=True))
    plain = p.logps(m.hidden, m.weight, m.bias, m.target)
    likely = p.nll(plain, m.target) if likelihood else plain.new_zeros(())
    beta = told.get("beta", BETA)
    metrics = (c, r, *p.half_means(m), likely, beta * (c - rc), beta * (r - rr))
    return total + alpha * likely, metrics


def run(m, **options):
    reference = options.get("use_ref_model", True)
    refs = (m.ref_hidden, m.ref_weight, m.ref_bias) if reference else ()
    return LigerFusedLinearDPOLoss(**{"beta": BETA, **options})(m.weight, m.hidden, m.target, m.bias, *refs)


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_every_loss_type(kind):
    e = 0.1 if kind in SMOOTHED else 0.0
    p.compare(
        lambda m: run(m, loss_type=kind, label_smoothing=e),
        lambda m: right(m, [kind], e=e),
        p.model(),
    )


@pytest.mark.parametrize("kind", ["sigmoid", "nca_pair", "aot"])
def test_without_a_reference_its_log_probabilities_are_0(kind):
    p.compare(
        lambda m: run(m, loss_type=kind, use_ref_model=False), lambda m: right(m, [kind], reference=False), p.model()
    )


@pytest.mark.parametrize("kind", [k for k in LOSS_TYPES if k not in ("ipo", "sigmoid_norm")])
def test_means_over_tokens(kind):
    e = 0.1 if kind in SMOOTHED else 0.0
    p.compare(
        lambda m: run(m, loss_type=kind, label_smoothing=e, average_log_prob=True, beta=3.0),
        lambda m: right(m, [kind], e=e, average=True, beta=3.0),
        p.model(),
    )


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "aot_unpaired"])
def test_the_likelihood_is_added(kind):
    p.compare(
        lambda m: run(m, loss_type=kind, compute_nll_loss=True, alpha=0.3),
        lambda m: right(m, [kind], alpha=0.3, likelihood=True),
        p.model(),
    )


def test_several_losses_and_their_weights():
    kinds, weights = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.5]
    p.compare(
        lambda m: run(m, loss_type=kinds, loss_weights=weights),
        lambda m: right(m, kinds[:2], weights[:2], alpha=1.5, likelihood=True),
        p.model(),
    )
    p.compare(
        lambda m: run(m, loss_type="sft"),
        lambda m: right(m, [], [], alpha=1.0, likelihood=True),
        p.model(),
    )


DIVERGENCES = {
    "forward_kl": lambda x: 1 - torch.exp(-x),
    "js_divergence": lambda x: torch.log(2 * x.exp() / (1 + x.exp())),
    "alpha_divergence": lambda x: (torch.exp(x * -0.3) - 1) / -0.3,
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("kind", BY_DIFFERENCE)
def test_f_divergences(name, kind):
    e = 0.1 if kind in SMOOTHED else 0.0
    told = {"f_alpha_divergence_coef": 0.7} if name == "alpha_divergence" else {}
    m = p.model(size=0.1)
    p.compare(
        lambda m: run(m, loss_type=kind, label_smoothing=e, f_divergence_type=name, **told),
        lambda m: right(m, [kind], e=e, divergence=DIVERGENCES[name]),
        m,
        rtol=1e-4,
    )


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_tokens_beyond_the_shorter_sequence_weigh_less(alpha):
    m = p.model()
    counted = (m.target != p.IGNORED).long()
    shared = torch.minimum(*counted.sum(-1).chunk(2)).repeat(2)
    weights = torch.where(counted.cumsum(-1) > shared[:, None], alpha, 1.0)
    assert (weights * counted != counted).any() or alpha == 1
    p.compare(lambda m: run(m, ld_alpha=alpha), lambda m: right(m, ["sigmoid"], weighting=weights), m)


@pytest.mark.parametrize("kind", ["sigmoid", "apo_zero"])
def test_pairs_weighted_by_their_probability(kind):
    def weighted(m):
        _, metrics = right(m, [kind])
        z = p.logits_of(m.hidden, m.weight, m.bias).detach()
        squares = torch.log((z.softmax(-1) ** 2).sum(-1))
        counted = (m.target != p.IGNORED).double()
        tokens = p.logps(m.hidden, m.weight, m.bias, m.target).detach()
        means = ((tokens - squares) * counted).sum(-1) / counted.sum(-1)
        tokens = p.logps(m.hidden, m.weight, m.bias, m.target)
        refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
        (c, r), (rc, rr) = tokens.sum(-1).chunk(2), refs.sum(-1).chunk(2)
        return (losses(kind, c, r, rc, rr, 1, 1) * means.chunk(2)[0].exp() * means.chunk(2)[1].exp()).mean(), metrics

    p.compare(lambda m: run(m, loss_type=kind, use_weighting=True), weighted, p.model(size=0.2))


def test_a_large_negative_difference_is_finite():
    m = p.model()
    for kind in LOSS_TYPES:
        e = 0.1 if kind in SMOOTHED else 0.0
        for sign in (-1.0, 1.0):
            refs = sign * torch.tensor([-1e4] * 3 + [1e4] * 3)
            loss, _ = LigerFusedLinearDPOLoss(loss_type=kind, label_smoothing=e, beta=1.0)(
                m.weight, m.hidden, m.target, m.bias, ref_logps=refs
            )
            if kind != "discopop" or sign > 0:  # whose exponential grows where its share is 1
                assert loss.isfinite(), kind
            assert all(not g.isnan().any() for g in torch.autograd.grad(loss, p.leaves(m))), kind


@pytest.mark.parametrize("given", ["sequences", "tokens"])
@pytest.mark.parametrize("average", [False, True])
def test_references_computed_before(given, average):
    m = p.model()
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
    known = p.scores(refs, m.target, average) if given == "sequences" else refs.masked_fill(m.target < 0, torch.nan)
    loss = LigerFusedLinearDPOLoss(average_log_prob=average)
    found, metrics = loss(m.weight, m.hidden, m.target, m.bias, ref_logps=known)
    again, others = loss(m.weight, m.hidden, m.target, m.bias, m.ref_hidden, m.ref_weight, m.ref_bias)
    torch.testing.assert_close(found, again, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics, others, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "other"},
        {"loss_type": ["sigmoid", "other"]},
        {"loss_type": []},
        {"loss_type": ["sigmoid"], "loss_weights": [1.0, 2.0]},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.5, "loss_type": "robust"},
        {"loss_type": "exo_pair"},
        {"discopop_tau": 0.1},
        {"discopop_tau": 0.0, "loss_type": "discopop"},
        {"alpha": 0.5},
        {"beta": 0.0},
        {"beta": "0.1"},
        {"f_divergence_type": "other"},
        {"f_divergence_type": "forward_kl", "loss_type": "nca_pair"},
        {"f_alpha_divergence_coef": 0.9},
        {"ld_alpha": 1.5},
        {"average_log_prob": True, "loss_type": "ipo"},
        {"use_weighting": True, "loss_type": "aot"},
        {"compute_nll_loss": "yes"},
        {"compiled": 2},
        {"chunk_size": 0},
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused(options):
    with pytest.raises(UnsupportedOptionError) as caught:
        LigerFusedLinearDPOLoss(**options)
    assert caught.value.fix
