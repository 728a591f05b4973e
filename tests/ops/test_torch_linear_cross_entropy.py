"""PyTorch's own linear cross-entropy: a competitor that is chosen only where verification lets it through."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liger_registry import Device, registry
from liger_registry.errors import VerificationError
from liger_registry.portable import torch_linear_cross_entropy as module
from liger_registry.problem import Problem
from liger_registry.testing import conformance_cases

OP, NAME = "fused_linear_cross_entropy", "any:torch_linear_cross_entropy"
needs_it = pytest.mark.skipif(not module.available(), reason="torch before 2.13 has no linear_cross_entropy")


def tensors(tokens=12, hidden=8, vocab=11):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
    w = torch.randn(vocab, hidden, generator=generator, requires_grad=True)
    target = torch.randint(vocab, (tokens,), generator=generator)
    target[3] = -100
    return x, w, target


def expected(x, w, target, **options):
    return F.cross_entropy(x.double() @ w.double().T, target, **options)


@needs_it
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}])
def test_pinned_it_gives_loss_and_gradients(options):
    x, w, target = tensors()
    loss = registry.get(OP, implementation=NAME)(x, w, target, **options)
    right = expected(x, w, target, **options)
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-6)
    for got, want in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(right, (x, w)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@needs_it
def test_pinned_it_divides_by_a_number_of_items():
    x, w, target = tensors()
    loss = registry.get(OP, implementation=NAME)(x, w, target, num_items=torch.tensor(5))
    torch.testing.assert_close(loss.double(), expected(x, w, target, reduction="sum") / 5, rtol=1e-5, atol=1e-6)


@needs_it
def test_pinned_it_keeps_the_contract_where_pytorch_has_another():
    handle = registry.get(OP, implementation=NAME)
    x, w, target = tensors()
    nothing = handle(x, w, torch.full_like(target, -100))
    assert nothing.item() == 0
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(nothing, (x, w)))
    target[5] = 11
    assert handle(x, w, target).isnan()


def test_it_is_not_chosen_unless_it_was_verified():
    (item,) = [i for i in registry.catalog.implementations(OP) if i.id == NAME]
    assert item.own
    assert not item.trusted
    order = registry.catalog.in_order(forward_problem())
    assert order[-1] is item
    x, w, target = tensors()
    for explanation in registry.get(OP).explain(x, w, target):
        assert explanation.decision.implementation.id != NAME


def forward_problem() -> Problem:
    op = registry.catalog.op(OP)
    given, options = op.bind(tensors(), {})
    return op.problem(op.describe(given, options), "forward", "grad_in_forward", (True, True, False))


@needs_it
def test_verification_rejects_it_today():
    """Should this fail with a newer torch: it is right now, and ``proven`` may go."""
    cases = [
        c for c in conformance_cases(OP, NAME) if "hidden=24,tokens=37,vocab=61-" in str(c) and "bfloat16" in str(c)
    ]
    with pytest.raises(VerificationError, match="error"):
        cases[0]()
    assert not [c for c in conformance_cases(OP) if NAME in str(c)]


def test_an_older_torch_has_no_configs(monkeypatch):
    (item,) = [i for i in registry.catalog.implementations(OP) if i.id == NAME]
    monkeypatch.setattr(module, "available", lambda: False)
    problem, cpu = forward_problem(), Device.parse("cpu")
    reason = item.why_illegal(item.heuristic(problem, cpu), problem, cpu)
    assert "2.13" in reason


@needs_it
@pytest.mark.parametrize("given", [{"num_items": torch.tensor(0)}, {"class_weight": torch.zeros(11)}], ids=str)
def test_a_mean_that_divides_by_nothing_is_zero(given):
    x, w, target = tensors()
    loss = registry.get(OP, implementation=NAME)(x, w, target, **given)
    assert loss.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w)))
