"""Pairs and sequences of which no token counts: they contribute 0, in every loss, and change nothing else.

A mean over pairs divides by all of them. Where a loss of nothing is not 0, such as the sigmoid's ln 2, a constant that
nothing was asked for would be added by batches that are padded with empty pairs, and where scores are means over tokens
it would be 0 / 0. TRL adds the constant, or is NaN; gradients agree.
"""

from __future__ import annotations

import copy
import math
import sys

import preference as p
import pytest
import torch
from preference_losses import LOSSES, against_reference, kto

from liger_registry.chunked_loss import Head, LigerFusedLinearCPOLoss, LigerFusedLinearKTOLoss, LinearPreferenceLoss
from liger_registry.chunked_loss.dpo import LOSS_TYPES, SMOOTHED

KINDS = {kind: against_reference(loss_type=kind, label_smoothing=0.1 if kind in SMOOTHED else 0) for kind in LOSS_TYPES}


def cpo(kind):
    def run(m, head=Head()):  # noqa: B008 - it is frozen
        loss = LigerFusedLinearCPOLoss(loss_type=kind, compute_nll_loss=False, head=head)
        return loss(m.weight, m.hidden, m.target, m.bias)

    return run


LIKELY = {"orpo": LOSSES["orpo"], "simpo": LOSSES["simpo"]}
EVERY = {**LIKELY, **{f"cpo-{kind}": cpo(kind) for kind in ("sigmoid", "hinge", "ipo")}, **KINDS}


def emptied(m, *rows):
    m.target[list(rows)] = p.IGNORED
    return m


def without(m, *pairs):
    """The same batch without those pairs."""
    n, half = copy.copy(m), m.target.shape[0] // 2
    rows = torch.tensor([r for r in range(2 * half) if r % half not in pairs])
    n.hidden, n.ref_hidden, n.target = m.hidden.detach()[rows].requires_grad_(), m.ref_hidden[rows], m.target[rows]
    return n, rows


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("compact", ["on", "off"])
@pytest.mark.parametrize("pair", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_an_empty_pair_adds_nothing_to_the_mean(name, compact, pair):
    m = emptied(p.model(), pair, pair + 3)
    n, rows = without(m, pair)
    (loss, metrics), (other, others) = (EVERY[name](x, head=Head(compact=compact)) for x in (m, n))
    likely = (metrics[4], others[4]) if name in LIKELY else (0.0, 0.0)
    torch.testing.assert_close((loss - likely[0]) * 3, (other - likely[1]) * 2, rtol=1e-4, atol=1e-5)
    if name in LIKELY:
        return  # the likelihood, a mean over tokens, has its own weight
    mine, theirs = torch.autograd.grad(loss, p.leaves(m)), torch.autograd.grad(other, p.leaves(n))
    torch.testing.assert_close(mine[0][rows] * 3, theirs[0] * 2, rtol=1e-4, atol=1e-6)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a * 3, b * 2, rtol=1e-4, atol=2e-6)
    assert not mine[0][[pair, pair + 3]].any()


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_of_empty_pairs_is_0(name):
    m = p.model()
    m.target.fill_(p.IGNORED)
    loss, metrics = EVERY[name](m)
    assert loss.item() == 0
    assert all(x.isfinite().all() for x in metrics)
    assert all(not g.any() for g in torch.autograd.grad(loss, p.leaves(m)))


def test_an_empty_sequence_of_kto_adds_nothing():
    m = emptied(p.model(), 1)
    loss, _ = kto(m)
    rows = torch.tensor([0, 2, 3, 4, 5])
    labels = torch.arange(6) % 3 != 1
    other, _ = LigerFusedLinearKTOLoss(use_ref_model=True)(
        m.hidden[rows], m.weight, m.target[rows], m.bias, labels[rows], m.ref_hidden[rows], m.ref_weight, m.ref_bias
    )
    torch.testing.assert_close(loss * 6, other * 5)


def logarithm(pairs):
    return -(-pairs.chosen).log() + (-pairs.rejected).log()


@pytest.mark.parametrize("separable", [True, False])
def test_what_a_function_makes_of_an_empty_pair_is_not_read(separable, monkeypatch):
    """Not its value, nor a derivative that is no number."""
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    monkeypatch.setattr(logarithm, "__module__", "own_module")
    m = emptied(p.model(), 1, 4)
    loss, _ = LinearPreferenceLoss(logarithm, separable=separable)(m.weight, m.hidden, m.target, m.bias)
    assert math.isfinite(loss.item())
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, p.leaves(m)))
