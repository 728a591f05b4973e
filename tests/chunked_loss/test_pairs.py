"""ORPO, CPO and SimPO against the papers' formulas in float64, values and gradients, and a loss of one's own."""

from __future__ import annotations

import preference as p
import pytest
import torch

from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    LinearPreferenceLoss,
    Pairs,
)
from liger_registry.chunked_loss.engine import path_of
from liger_registry.chunked_loss.orpo import log1mexp
from liger_registry.errors import InvalidInputError, UnsupportedOptionError


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def halves(m, average):
    return p.scores(p.logps(m.hidden, m.weight, m.bias, m.target), m.target, average).chunk(2)


def smooth(x, e):
    return -(1 - e) * torch.log(sigma(x)) - e * torch.log(sigma(-x))


def orpo(m, beta=0.1, likely=None, likelihood=True):
    c, r = halves(m, True)
    odds = torch.log(c.exp() / (1 - c.exp())) - torch.log(r.exp() / (1 - r.exp()))
    ratio = torch.log(sigma(odds))
    tokens = p.logps(m.hidden, m.weight, m.bias, m.target)
    if likely is not None:
        half = m.target.shape[0] // 2
        tokens = p.logps(m.hidden[:half], m.weight, m.bias, likely[:half])
        nll = -tokens.sum() / (likely[:half] != p.IGNORED).sum()
    else:
        nll = p.nll(tokens, m.target) if likelihood else tokens.new_zeros(())
    metrics = (c, r, *p.half_means(m), nll, beta * c, beta * r, ratio.mean(), odds.mean())
    return nll - beta * ratio.mean(), metrics


def cpo(m, kind="sigmoid", beta=0.1, e=0.0, alpha=1.0, average=False, reward_alpha=0.0, gamma=None):
    c, r = halves(m, average or kind == "ipo" or gamma is not None)
    u, v = ((1 - torch.exp(-reward_alpha * x)) / reward_alpha if reward_alpha else x for x in (c, r))
    d = beta * (u - v) - (gamma or 0.0)
    losses = {
        "sigmoid": lambda: smooth(d, e),
        "hinge": lambda: torch.clamp(1 - d, min=0),
        "ipo": lambda: (u - v - 1 / (2 * beta)) ** 2,
    }[kind]()
    nll = p.nll(p.logps(m.hidden, m.weight, m.bias, m.target), m.target) if alpha else c.new_zeros(())
    return losses.mean() + alpha * nll, (c, r, *p.half_means(m), nll, beta * u, beta * v)


def call(loss, m, *more):
    return loss(m.weight, m.hidden, m.target, m.bias, *more)


@pytest.mark.parametrize("options", [{}, {"beta": 0.7}, {"compute_nll_loss": False}], ids=str)
def test_orpo(options):
    told = {"likelihood": options.get("compute_nll_loss", True), "beta": options.get("beta", 0.1)}
    p.compare(lambda m: call(LigerFusedLinearORPOLoss(**options), m), lambda m: orpo(m, **told), p.model())


@pytest.mark.parametrize("compact", ["on", "off"])
@pytest.mark.parametrize("whole", [True, False])
def test_orpo_with_other_targets_of_the_likelihood(compact, whole):
    m = p.model()
    likely = m.target.clone()
    likely[0, :3] = 5  # the prompt too
    likely[1, 2] = (likely[1, 2] + 1) % 37  # another target than that of the odds
    likely[2, 3] = p.IGNORED
    given = likely if whole else likely[:3]
    loss = LigerFusedLinearORPOLoss(head=Head(compact=compact))
    p.compare(lambda m: call(loss, m, given), lambda m: orpo(m, likely=likely), m)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.5, "label_smoothing": 0.2, "alpha": 0.4},
        {"compute_nll_loss": False, "average_log_prob": True},
        {"loss_type": "hinge"},
        {"loss_type": "ipo", "beta": 0.3},
        {"reward_alpha": 0.05},
    ],
    ids=str,
)
def test_cpo(options):
    told = {
        "kind": options.get("loss_type", "sigmoid"),
        "e": options.get("label_smoothing", 0.0),
        "alpha": options.get("alpha", 1.0) if options.get("compute_nll_loss", True) else 0.0,
        "average": options.get("average_log_prob", False),
        **{name: options[name] for name in ("beta", "reward_alpha") if name in options},
    }
    p.compare(lambda m: call(LigerFusedLinearCPOLoss(**options), m), lambda m: cpo(m, **told), p.model(), rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 2.0, "gamma": 1.5, "label_smoothing": 0.1, "alpha": 0.4}, {"compute_nll_loss": False}],
    ids=str,
)
def test_simpo(options):
    told = {
        "beta": options.get("beta", 0.1),
        "gamma": options.get("gamma", 0.5),
        "e": options.get("label_smoothing", 0.0),
        "alpha": options.get("alpha", 1.0) if options.get("compute_nll_loss", True) else 0.0,
    }
    p.compare(lambda m: call(LigerFusedLinearSimPOLoss(**options), m), lambda m: cpo(m, **told), p.model())


@pytest.mark.parametrize("value", [-1e-37, -1e-20, -1e-8, -1e-3, -0.5, -0.7, -2.0, -50.0, -200.0])
def test_log_of_one_minus_a_probability(value):
    x = torch.tensor(value, dtype=torch.float32, requires_grad=True)
    found = log1mexp(x)
    exact = torch.tensor(value, dtype=torch.float64)
    right = torch.log(-torch.expm1(exact)) if value > -1 else torch.log1p(-exact.exp())
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-38)
    (slope,) = torch.autograd.grad(found, x)
    torch.testing.assert_close(slope.double(), -1 / torch.expm1(-exact), rtol=1e-5, atol=1e-38)


def test_a_sequence_of_probability_1_has_finite_odds():
    weight = torch.tensor([[200.0], [0.0]], requires_grad=True)
    hidden = torch.tensor([[[1.0]], [[1.0]], [[1.0]], [[-1.0]]], requires_grad=True)
    target = torch.tensor([[0], [1], [0], [0]])
    loss, metrics = LigerFusedLinearORPOLoss()(weight, hidden, target)
    assert metrics[0][0] == metrics[1][0] == 0  # both are sure
    assert loss.isfinite()
    assert all(x.isfinite().all() for x in metrics)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (weight, hidden)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LigerFusedLinearORPOLoss, {"beta": -0.1}),
        (LigerFusedLinearORPOLoss, {"compute_nll_loss": None}),
        (LigerFusedLinearCPOLoss, {"loss_type": "simpo"}),
        (LigerFusedLinearCPOLoss, {"label_smoothing": 1.5}),
        (LigerFusedLinearCPOLoss, {"label_smoothing": 0.1, "loss_type": "hinge"}),
        (LigerFusedLinearCPOLoss, {"alpha": 2.0, "compute_nll_loss": False}),
        (LigerFusedLinearSimPOLoss, {"alpha": 2.0, "compute_nll_loss": False}),
        (LigerFusedLinearSimPOLoss, {"chunk_size": 0}),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused(kind, options):
    with pytest.raises(UnsupportedOptionError):
        kind(**options)


# -- a loss of one's own -----------------------------------------------------------------------------------------------


def margin(pairs: Pairs, beta: float = 0.1, width: float = 1.0):
    gap = pairs.chosen_logratios - pairs.rejected_logratios
    return torch.relu(width - beta * gap), gap.detach()


def own(m, beta, width, average=False):
    c, r = halves(m, average)
    refs = p.scores(p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target), m.target, average).chunk(2)
    gap = (c - refs[0]) - (r - refs[1])
    return torch.clamp(width - beta * gap, min=0).mean(), (c, r, *p.half_means(m), c.new_zeros(()), gap)


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_a_loss_of_ones_own(separable, average):
    assert path_of(margin) is None or path_of(margin).endswith(":margin")
    loss = LinearPreferenceLoss(
        margin, use_ref_model=True, separable=separable, average_log_prob=average, beta=0.4, width=3.0
    )
    p.compare(
        lambda m: call(loss, m, m.ref_hidden, m.ref_weight, m.ref_bias), lambda m: own(m, 0.4, 3.0, average), p.model()
    )


def test_a_loss_without_a_name_goes_the_other_way():
    loss = LinearPreferenceLoss(lambda pairs, beta: -beta * (pairs.chosen - pairs.rejected), separable=True, beta=2.0)

    def right(m):
        c, r = halves(m, False)
        return -2 * (c - r).mean(), (c, r, *p.half_means(m), c.new_zeros(()))

    p.compare(lambda m: call(loss, m), right, p.model())


def test_a_loss_of_ones_own_with_a_likelihood():
    loss = LinearPreferenceLoss(margin, compute_nll_loss=True, alpha=0.25, width=2.0)
    m = p.model()
    nll = p.nll(p.logps(m.hidden, m.weight, m.bias, m.target), m.target)
    found, metrics = call(loss, m)
    torch.testing.assert_close(metrics[4], nll.detach())
    bare, _ = call(LinearPreferenceLoss(margin, width=2.0), m)
    torch.testing.assert_close(found, bare + 0.25 * nll)


def test_what_a_pair_knows():
    seen = []

    def look(pairs):
        seen.append(pairs)
        return pairs.chosen

    m = p.model()
    call(LinearPreferenceLoss(look), m)
    c, r = halves(m, False)
    lengths = (m.target != p.IGNORED).sum(-1).chunk(2)
    for pairs in seen:
        torch.testing.assert_close([pairs.chosen, pairs.rejected], [c, r])
        torch.testing.assert_close([pairs.chosen_lengths, pairs.rejected_lengths], [n.float() for n in lengths])
        assert not pairs.ref_chosen.any()
        assert not pairs.ref_rejected.any()
    assert len(seen) == 2  # for the loss, and for the metrics


def test_references_that_do_not_fit_are_refused():
    m = p.model()
    loss = LinearPreferenceLoss(margin, use_ref_model=True)
    with pytest.raises(InvalidInputError, match="no reference"):
        call(loss, m)
    with pytest.raises(InvalidInputError, match="no reference"):
        call(loss, m, m.ref_hidden)
    with pytest.raises(InvalidInputError, match="two references"):
        loss(m.weight, m.hidden, m.target, m.bias, m.ref_hidden, m.ref_weight, ref_logps=torch.zeros(6))
    with pytest.raises(InvalidInputError, match="ref_logps"):
        loss(m.weight, m.hidden, m.target, m.bias, ref_logps=torch.zeros(3))
    with pytest.raises(InvalidInputError, match="no effect"):
        call(LinearPreferenceLoss(margin), m, m.ref_hidden, m.ref_weight)
