"""What holds for every loss: values known beforehand, tokens without influence, calls that are refused."""

from __future__ import annotations

import copy
import math

import preference as p
import pytest
import torch
from preference_losses import EVERY, LOSSES, against_reference, grpo, kto, numbers

from liger_registry.chunked_loss import Head, LigerFusedLinearGRPOLoss
from liger_registry.chunked_loss.dpo import SEPARABLE, SMOOTHED
from liger_registry.errors import InvalidInputError, UnsupportedOptionError

# -- values known beforehand -------------------------------------------------------------------------------------------


def same_model(**told):
    m = p.model(**told)
    m.ref_hidden, m.ref_weight, m.ref_bias = (None if t is None else t.detach() for t in (m.hidden, m.weight, m.bias))
    return m


@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm", "aot", "aot_unpaired", "robust"])
def test_a_policy_equal_to_its_reference_has_the_loss_ln_2(kind):
    loss, metrics = against_reference(loss_type=kind)(same_model())
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert not metrics[5].any()
    assert not metrics[6].any()


def test_other_losses_of_a_policy_equal_to_its_reference():
    known = {
        "hinge": 1.0,
        "ipo": 25.0,
        "nca_pair": 2 * math.log(2),
        "bco_pair": 2 * math.log(2),
        "sppo_hard": 50.0,
        "apo_zero": 1.0,
        "apo_down": 1.0,
        "discopop": (math.log(2) + 1) / 2,
    }
    for kind, value in known.items():
        loss, _ = against_reference(loss_type=kind)(same_model())
        assert loss.item() == pytest.approx(value, rel=1e-6), kind
    loss, _ = kto(same_model())
    assert loss.item() == pytest.approx(0.5)
    loss, (divergence, clipped) = grpo(same_model())
    assert divergence.item() == pytest.approx(0, abs=1e-7)
    assert clipped.item() == 0


BY_PAIR = {name: LOSSES[name] for name in ("dpo", "orpo", "cpo", "simpo")} | {
    kind: against_reference(loss_type=kind, label_smoothing=0.1 if kind in SMOOTHED else 0.0) for kind in SEPARABLE
}


@pytest.mark.parametrize("name", BY_PAIR)
def test_the_loss_falls_as_the_chosen_log_probability_rises(name):
    """Down the slope by the chosen sequences' hidden states alone."""
    m = p.model(size=0.1)
    loss, metrics = BY_PAIR[name](m)
    (slope,) = torch.autograd.grad(loss, m.hidden)
    with torch.no_grad():
        m.hidden[:3] -= 1e-2 * slope[:3] / slope[:3].norm()
    after, others = BY_PAIR[name](m)
    rise = (others[0] - metrics[0]).sum()
    assert after < loss
    assert (rise < 0) if name == "apo_down" else (rise > 0)  # which lowers it, and that of the rejected ones more


# -- tokens without influence ------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("compact", ["on", "off"])
def test_prompts_and_padding_have_no_influence(name, compact):
    m = p.model()
    none = m.target == p.IGNORED
    found = []
    for factor in (1.0, 1e4):
        n = copy.copy(m)
        n.hidden = torch.where(none[..., None], m.hidden.detach() * factor, m.hidden.detach()).requires_grad_()
        n.ref_hidden = torch.where(none[..., None], m.ref_hidden * factor, m.ref_hidden)
        found.append(numbers(LOSSES[name], n, head=Head(compact=compact)))
        assert not found[-1][-3][none].any()
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        logits = "grpo" not in name and "gspo" not in name and number in (3, 4)  # metrics of all tokens
        assert logits or torch.equal(a, b), number


@EVERY
def test_more_padding_changes_nothing(name):
    m = p.model()
    n = copy.copy(m)
    pad = torch.nn.functional.pad
    n.hidden = pad(m.hidden.detach(), (0, 0, 0, 4), value=2.0).requires_grad_()
    n.ref_hidden = pad(m.ref_hidden, (0, 0, 0, 4), value=2.0)
    n.target = pad(m.target, (0, 4), value=p.IGNORED)
    mine, others = LOSSES[name](m)[0], LOSSES[name](n)[0]
    torch.testing.assert_close(mine, others, rtol=1e-6, atol=1e-7)
    a, b = torch.autograd.grad(mine, (m.hidden, m.weight)), torch.autograd.grad(others, (n.hidden, n.weight))
    torch.testing.assert_close(a[0], b[0][:, :7], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(a[1], b[1], rtol=1e-5, atol=1e-6)


@EVERY
@pytest.mark.parametrize("compact", ["on", "off"])
@pytest.mark.parametrize("left", ["sequences", "tokens", "nothing"])
def test_nothing_to_count(name, compact, left):
    m = p.model()
    m.target.fill_(p.IGNORED)
    rows, columns = {"sequences": (6, 7), "tokens": (6, 0), "nothing": (0, 7)}[left]
    for key in ("hidden", "ref_hidden", "target"):
        cut = getattr(m, key)[:rows, :columns].detach()
        setattr(m, key, cut.requires_grad_(key == "hidden"))
    found = numbers(LOSSES[name], m, head=Head(compact=compact))
    assert found[0].item() == 0
    assert all(x.isfinite().all() for x in found)
    assert all(not g.any() for g in found[-3:])


@EVERY
def test_a_sequence_without_tokens(name):
    m = p.model()
    m.target[1] = p.IGNORED
    found = numbers(LOSSES[name], m)
    assert all(x.isfinite().all() for x in found)
    assert not found[-3][1].any()


def test_a_pair_without_tokens_contributes_0():
    for name in ("dpo", "orpo", "cpo", "simpo"):
        m = p.model()
        m.target[1] = m.target[4] = p.IGNORED
        n = copy.copy(m)
        rows = torch.tensor([0, 2, 3, 5])
        n.hidden, n.ref_hidden, n.target = m.hidden[rows], m.ref_hidden[rows], m.target[rows]
        loss, metrics = LOSSES[name](m)
        other, _ = LOSSES[name](n)
        # A mean over three pairs, and one over two; the likelihood is a mean over tokens.
        torch.testing.assert_close((loss - metrics[4]) * 3, (other - metrics[4]) * 2, rtol=1e-4, atol=1e-5)


@EVERY
def test_a_class_that_is_none_gives_no_plausible_number(name):
    m = p.model()
    m.target[0, 3] = 37
    loss, _ = LOSSES[name](m)
    assert loss.isnan()


# -- calls that do not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "orpo", "cpo", "simpo"])
def test_an_odd_batch_is_refused(name):
    m = p.model(sequences=5)
    with pytest.raises(InvalidInputError, match="5 sequences"):
        LOSSES[name](m)


@EVERY
def test_shapes_that_do_not_fit_are_refused(name):
    m = p.model()
    m.target = m.target[:, :-1]
    with pytest.raises(InvalidInputError):
        LOSSES[name](m)
    m = p.model()
    m.hidden = m.hidden.detach().flatten(0, 1)
    with pytest.raises(InvalidInputError):
        LOSSES[name](m)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 0.0}, {"logit_scale": 0.0}, {"temperature": -1.0}, {"compact": "maybe"}, {"softcap": "30"}],
    ids=str,
)
def test_heads_that_cannot_be_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        Head(**options)


def test_two_temperatures_are_refused():
    with pytest.raises(UnsupportedOptionError, match="temperatures"):
        LigerFusedLinearGRPOLoss(temperature=0.5, head=Head(temperature=0.7))
