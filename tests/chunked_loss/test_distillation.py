"""Distillation over two heads against float64 formulas with all logits there: values, parts and gradients."""

from __future__ import annotations

import preference as p
import pytest
import torch
from linear_losses import Live

from liger_registry import registry
from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
    LinearDistillationLoss,
    slabs,
)
from liger_registry.chunked_loss import divergence as divergences
from liger_registry.errors import InvalidInputError, UnsupportedOptionError, UnsupportedTransformError

WEIGHTS = [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0), (0.3, 0.9)]


def heads(extra=0, **told):
    m = p.model(**told)
    if extra:
        m.ref_weight = torch.cat([m.ref_weight, torch.randn(extra, 12)])
        m.ref_bias = None if m.ref_bias is None else torch.cat([m.ref_bias, torch.randn(extra)])
    return m


def call(loss, m):
    return loss(m.hidden, m.weight, m.ref_hidden, m.ref_weight, m.target, m.bias, m.ref_bias)


def parts(loss, m):
    found = call(loss, m)
    return found[0], found[1:]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("extra", [0, 5])
def test_jensen_shannon(weights, beta, extra):
    hard, soft = weights
    loss = LigerFusedLinearJSDLoss(hard, soft, beta, temperature=1.5, return_soft_hard_loss=True)
    p.compare(lambda m: parts(loss, m), lambda m: p.distilled(m, p.jsd(beta), hard, soft, 1.5), heads(extra))


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("extra", [0, 5])
def test_cosine(weights, extra):
    hard, soft = weights
    loss = LigerFusedLinearCosineSimilarityLoss(hard, soft, 0.7, return_soft_hard_loss=True)
    p.compare(lambda m: parts(loss, m), lambda m: p.distilled(m, p.cosine(0.7), hard, soft), heads(extra))


@pytest.mark.parametrize("bias", [True, False])
def test_without_the_parts_there_is_one_number(bias):
    m = heads(bias=bias)
    for kind in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
        whole, soft, hard = call(kind(0.2, 0.8, return_soft_hard_loss=True), m)
        torch.testing.assert_close(call(kind(0.2, 0.8), m), whole)
        torch.testing.assert_close(call(kind(0.0, 1.0), m), soft, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(call(kind(1.0, 0.0), m), hard, rtol=1e-5, atol=1e-6)
        assert not soft.requires_grad
        assert not hard.requires_grad


HEADS = [
    {"softcap": 3.0},
    {"logit_scale": 0.4},
    {"softcap": 2.0, "logit_scale": 1.5},
    {"softcap": 2.0, "logit_scale": 1.5, "temperature": 0.7},
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS[:3], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_caps_and_scales(head, weights, bias):
    hard, soft = weights
    loss = LigerFusedLinearJSDLoss(hard, soft, 0.4, temperature=2.0, return_soft_hard_loss=True, head=Head(**head))
    p.compare(lambda m: parts(loss, m), lambda m: p.distilled(m, p.jsd(0.4), hard, soft, 2.0, **head), heads(bias=bias))
    loss = LigerFusedLinearCosineSimilarityLoss(hard, soft, return_soft_hard_loss=True, head=Head(**head))
    p.compare(lambda m: parts(loss, m), lambda m: p.distilled(m, p.cosine(0.5), hard, soft, **head), heads())


def squares(student, teacher, factor=1.0):
    return factor * (student - teacher).square().mean(-1)


@pytest.mark.parametrize("head", [{}, {"softcap": 2.0}], ids=str)
def test_a_loss_of_ones_own(head):
    loss = LinearDistillationLoss(
        squares, weight_hard_loss=0.25, weight_soft_loss=2.0, temperature=1.3, factor=0.5, head=Head(**head)
    )
    p.compare(
        lambda m: (call(loss, m), ()),
        lambda m: (p.distilled(m, lambda s, t: squares(s, t, 0.5), 0.25, 2.0, 1.3, **head)[0], ()),
        heads(),
    )


@pytest.mark.parametrize("kind", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(kind, dtype):
    m = heads(dtype=dtype)
    exact = p.wide(m)
    formula = p.jsd(0.5) if kind is LigerFusedLinearJSDLoss else p.cosine(0.5)
    found, (truth, _) = call(kind(), m), p.distilled(exact, formula, 0.5, 0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth, rtol=2e-2, atol=1e-3)
    grads = torch.autograd.grad(found, p.leaves(m)), torch.autograd.grad(truth, p.leaves(exact))
    for mine, right in zip(*grads, strict=True):
        assert mine.dtype == dtype
        assert ((mine.double() - right).norm() / right.norm()).item() < 2e-2


@pytest.mark.parametrize("kind", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
def test_results_do_not_depend_on_the_slabs(kind, monkeypatch):
    m = heads(sequences=40, tokens=10)
    found = []
    for budget, rows in ((None, 64 << 20), (1, 64 << 20), (200_000, 4 * 37 * 3)):
        monkeypatch.setattr(divergences, "AT_ONCE", rows)
        loss = call(kind(return_soft_hard_loss=True, head=Head(memory_budget=budget)), m)
        found.append([*loss, *torch.autograd.grad(loss[0], p.leaves(m))])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-5, atol=1e-6)


def test_slabs_by_the_budget():
    big = slabs.Model(
        *(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8192, 64), (1000, 64))), None
    )

    def planned(budget, dtype=torch.bfloat16):
        model = slabs.Model(big.states.to(dtype), big.weight.to(dtype), None)
        job = slabs.Job(None, True, 0.0, 1.0, -100, 1.0, Head(memory_budget=budget))
        return slabs.plan(job, model, model, 8192)

    assert planned(None) == (2048, False)  # a quarter of all rows: the head's gradient is rounded four times
    assert planned(None, torch.float16) == (2048, True)
    assert planned(None, torch.float32) == (2048, False)
    assert planned(10 << 20) == (1024, True)
    assert planned(0) == (128, True)


def rows_of_slabs(monkeypatch, m, **told):
    """How many rows each slab of a call has, and the call's loss."""
    seen, real = [], slabs.cut_slab
    monkeypatch.setattr(
        slabs, "cut_slab", lambda memory, rows, columns: seen.append(rows) or real(memory, rows, columns)
    )
    loss = call(LigerFusedLinearCosineSimilarityLoss(head=Head(compact="off", **told)), m)
    monkeypatch.setattr(slabs, "cut_slab", real)
    return seen[::2], loss


def test_what_was_decided_for_the_same_products_decides_the_slabs(monkeypatch):
    m = heads(sequences=40, tokens=10)
    usual, right = rows_of_slabs(monkeypatch, m)
    assert usual == [400]
    with registry.use("fused_linear_jsd", {"forward": "chunked"}, {"slab_rows": 128, "sums": "input"}):
        rows, loss = rows_of_slabs(monkeypatch, m)
    assert rows == [128, 128, 128, 16]
    torch.testing.assert_close(loss, right)
    with registry.use("fused_linear_jsd", {"forward": "single"}):
        assert rows_of_slabs(monkeypatch, m)[0] == [400]
        assert rows_of_slabs(monkeypatch, heads(5, sequences=40, tokens=10))[0] == [400]  # other vocabularies


def test_the_environments_budget_is_kept(monkeypatch):
    m = heads(sequences=40, tokens=10)
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "1")
    registry.reload()
    assert rows_of_slabs(monkeypatch, m)[0] == [128, 128, 128, 16]
    assert rows_of_slabs(monkeypatch, m, memory_budget=1 << 30)[0] == [400]


def test_evaluation_makes_no_gradient_products(monkeypatch):
    m = heads()
    monkeypatch.setattr(slabs, "add_product", None)
    for kind in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
        with torch.no_grad():
            loss = call(kind(), m)
        assert not loss.requires_grad
        monkeypatch.undo()
        torch.testing.assert_close(loss, call(kind(), m).detach())
        monkeypatch.setattr(slabs, "add_product", None)


def test_a_function_that_reads_no_student_has_no_gradient():
    m = heads()
    loss = call(LinearDistillationLoss(lambda s, t: t.square().mean(-1), weight_hard_loss=0.0, weight_soft_loss=1.0), m)
    assert loss > 0
    assert not any(g.any() for g in torch.autograd.grad(loss, p.leaves(m)))


def test_no_logits_beyond_the_slabs():
    m = heads(sequences=64, tokens=128, hidden=8, vocab=1000, bias=False)
    whole = 64 * 128 * 1000 * 4
    budget = whole // 4
    with Live() as live:
        loss = call(LigerFusedLinearCosineSimilarityLoss(head=Head(memory_budget=budget)), m)
        torch.autograd.grad(loss, p.leaves(m))
    assert live.peak < whole // 2


@pytest.mark.parametrize("kind", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
@pytest.mark.parametrize("compact", ["on", "off"])
def test_tokens_that_do_not_count_have_no_influence(kind, compact):
    m = heads()
    none = m.target == p.IGNORED
    found = []
    for factor in (1.0, 1e3):
        hidden = torch.where(none[..., None], m.hidden.detach() * factor, m.hidden.detach()).requires_grad_()
        other = torch.where(none[..., None], m.ref_hidden * factor, m.ref_hidden)
        loss = kind(head=Head(compact=compact))(hidden, m.weight, other, m.ref_weight, m.target, m.bias, m.ref_bias)
        found.append([loss, *torch.autograd.grad(loss, (hidden, m.weight, m.bias))])
        assert not found[-1][1][none].any()
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
@pytest.mark.parametrize("compact", ["on", "off"])
@pytest.mark.parametrize("rows", [6, 0])
def test_nothing_to_count(kind, compact, rows):
    m = heads()
    m.target.fill_(p.IGNORED)
    for name in ("hidden", "ref_hidden", "target"):
        setattr(m, name, getattr(m, name)[:rows].detach().requires_grad_(name == "hidden"))
    loss = call(kind(head=Head(compact=compact)), m)
    assert loss.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, p.leaves(m)))


def test_equal_heads_have_no_loss_and_no_gradient():
    m = heads(bias=False)
    for kind in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
        loss = kind(0.0, 1.0)(m.hidden, m.weight, m.hidden.detach(), m.weight.detach(), m.target)
        assert loss.item() == pytest.approx(0, abs=1e-7)
        assert all(g.abs().max() < 1e-7 for g in torch.autograd.grad(loss, p.leaves(m)))


def test_rows_of_zeros_have_no_direction():
    m = heads(bias=False)
    with torch.no_grad():
        m.hidden.zero_()
    loss = call(LigerFusedLinearCosineSimilarityLoss(0.0, 1.0), m)
    assert loss.item() == pytest.approx(0.5)  # a cosine of 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, p.leaves(m)))


def test_only_what_is_asked_for_is_computed():
    for names in (("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()):
        m = heads()
        for name in ("hidden", "weight", "bias"):
            getattr(m, name).requires_grad_(name in names)
        exact = p.wide(m)
        loss = call(LigerFusedLinearJSDLoss(), m)
        if not names:
            assert not loss.requires_grad
            continue
        mine = torch.autograd.grad(loss, p.leaves(m))
        right = torch.autograd.grad(p.distilled(exact, p.jsd(0.5), 0.5, 0.5)[0], p.leaves(exact))
        torch.testing.assert_close([g.double() for g in mine], list(right), rtol=1e-4, atol=1e-6)


def test_backward_twice_and_nobodys_memory_is_written():
    m = heads()
    m.teacher = m.ref_weight.requires_grad_()
    before = {name: t.detach().clone() for name, t in vars(m).items() if torch.is_tensor(t)}
    loss = call(LigerFusedLinearJSDLoss(), m)
    first = torch.autograd.grad(loss, p.leaves(m), torch.tensor(3.0), retain_graph=True)
    second = torch.autograd.grad(loss, p.leaves(m), torch.tensor(3.0), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.autograd.grad(loss, m.teacher, allow_unused=True, retain_graph=True) == (None,)
    assert all(torch.equal(before[name], getattr(m, name)) for name in before)
    (slope,) = torch.autograd.grad(loss, m.hidden, create_graph=True)
    with pytest.raises(UnsupportedTransformError):
        torch.autograd.grad(slope.sum(), m.hidden)


def test_autocast():
    m = heads()
    with torch.autocast("cpu", torch.bfloat16):
        for kind in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
            for weights in WEIGHTS[:2]:
                loss = call(kind(*weights), m)
                grads = torch.autograd.grad(loss, p.leaves(m))
                assert loss.dtype == torch.float32
                assert {g.dtype for g in grads} == {torch.float32}
                exact = p.wide(m)
                formula = p.jsd(0.5) if kind is LigerFusedLinearJSDLoss else p.cosine(0.5)
                with torch.autocast("cpu", enabled=False):
                    truth, _ = p.distilled(exact, formula, *weights)
                torch.testing.assert_close(loss.double(), truth, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beta": 1.5}, {"beta": -0.1}, {"weight_hard_loss": "1"}])
def test_what_is_not_honoured_is_refused(options):
    with pytest.raises(UnsupportedOptionError):
        LigerFusedLinearJSDLoss(**options)


def test_angles_do_not_depend_on_the_temperature():
    with pytest.raises(UnsupportedOptionError, match="temperature"):
        LigerFusedLinearCosineSimilarityLoss(temperature=2.0)


def test_heads_that_do_not_fit_are_refused():
    m = heads()
    loss = LigerFusedLinearJSDLoss()
    with pytest.raises(InvalidInputError, match="vocabulary"):
        loss(m.hidden, m.weight, m.ref_hidden, m.ref_weight[:-1], m.target)
    with pytest.raises(InvalidInputError, match="row by row"):
        loss(m.hidden, m.weight, m.ref_hidden[:-1], m.ref_weight, m.target)
    with pytest.raises(InvalidInputError, match="row by row"):
        loss(m.hidden, m.weight, m.ref_hidden, m.ref_weight, m.target[:-1])
    with pytest.raises(InvalidInputError, match="weight"):
        loss(m.hidden, m.weight[:, :-1], m.ref_hidden, m.ref_weight, m.target)
