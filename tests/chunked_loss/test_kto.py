"""KTO against the paper's formula in float64, values, metrics and gradients."""

from __future__ import annotations

import preference as p
import pytest
import torch

from liger_registry.chunked_loss import LigerFusedLinearKTOLoss
from liger_registry.chunked_loss.kto import kl_estimate
from liger_registry.errors import InvalidInputError, UnsupportedOptionError

WANTED = torch.tensor([True, False, True, True, False, False])


def right(m, kl=0.0, beta=0.1, reference=True, average=False, weights=(1.0, 1.0), wanted=WANTED):
    scores = p.scores(p.logps(m.hidden, m.weight, m.bias, m.target), m.target, average)
    refs = p.scores(p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target), m.target, average)
    ratios = scores - refs if reference else scores
    good = 1 - torch.sigmoid(beta * (ratios - kl))
    bad = 1 - torch.sigmoid(beta * (kl - ratios))
    losses = torch.where(wanted, weights[0] * good, weights[1] * bad)
    sums = p.logits_of(m.hidden, m.weight, m.bias).sum((1, 2))
    metrics = [x[w].sum() for x in (scores, sums, beta * ratios) for w in (wanted, ~wanted)]
    return losses.mean(), metrics


def run(m, kl=None, labels=WANTED, **options):
    reference = options.get("use_ref_model", True)
    refs = (m.ref_hidden, m.ref_weight, m.ref_bias) if reference else (None, None, None)
    loss = LigerFusedLinearKTOLoss(**{"use_ref_model": True, **options})
    return loss(m.hidden, m.weight, m.target, m.bias, labels, *refs, kl)


@pytest.mark.parametrize(
    "kl", [None, torch.tensor(0.6), torch.tensor([0.6]), torch.rand(6)], ids=["none", "0", "1", "6"]
)
@pytest.mark.parametrize("average", [False, True])
def test_kto(kl, average):
    p.compare(
        lambda m: run(m, kl, average_log_prob=average, beta=0.3),
        lambda m: right(m, 0.0 if kl is None else kl.double(), beta=0.3, average=average),
        p.model(),
        rtol=1e-4,
    )


def test_without_a_reference():
    p.compare(lambda m: run(m, use_ref_model=False), lambda m: right(m, reference=False), p.model(), rtol=1e-4)


def test_weights_of_both_kinds():
    p.compare(
        lambda m: run(m, torch.tensor(0.2), desirable_weight=1.5, undesirable_weight=0.25),
        lambda m: right(m, 0.2, weights=(1.5, 0.25)),
        p.model(),
        rtol=1e-4,
    )


def test_the_other_loss_is_that_without_a_divergence():
    p.compare(lambda m: run(m, loss_type="apo_zero_unpaired"), right, p.model(), rtol=1e-4)


@pytest.mark.parametrize("value", [True, False])
def test_sequences_of_one_kind(value):
    labels = torch.full((6,), value)
    p.compare(lambda m: run(m, labels=labels.long()), lambda m: right(m, wanted=labels), p.model(), rtol=1e-4)


def test_the_estimate_of_the_divergence():
    policy, reference = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-2.0, -2.5])
    found = kl_estimate(policy, reference)
    assert found.item() == 0.75
    assert not found.requires_grad
    assert kl_estimate(reference, policy).item() == 0


def test_references_computed_before():
    m = p.model()
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
    loss = LigerFusedLinearKTOLoss(use_ref_model=True)
    for known in (refs, refs.sum(-1)):
        found = loss(m.hidden, m.weight, m.target, m.bias, WANTED, ref_logps=known)
        torch.testing.assert_close(found, run(m), rtol=1e-5, atol=1e-5)


def test_what_is_not_honoured_is_refused():
    m = p.model()
    for options in ({"beta": 0}, {"loss_type": "bco"}, {"desirable_weight": -1.0}, {"use_ref_model": 2}):
        with pytest.raises(UnsupportedOptionError):
            LigerFusedLinearKTOLoss(**options)
    with pytest.raises(InvalidInputError, match="preference_labels"):
        run(m, labels=None)
    with pytest.raises(InvalidInputError, match="preference_labels"):
        run(m, labels=WANTED[:4])
    with pytest.raises(InvalidInputError, match="kl"):
        run(m, kl=torch.rand(5))
    with pytest.raises(InvalidInputError, match="kl"):
        run(m, kl=torch.rand(()), loss_type="apo_zero_unpaired")
