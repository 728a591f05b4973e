"""Slabs, memory and waiting: results are those of any slab, nothing is as large as all logits, nothing waits."""

from __future__ import annotations

import copy

import preference as p
import pytest
import torch
from linear_losses import Live
from preference_losses import EVERY, LOSSES, numbers
from torch.utils._python_dispatch import TorchDispatchMode

from liger_registry import registry
from liger_registry.chunked_loss import Head
from liger_registry.portable.linear_sequence_loss import Groups

WAYS = [
    ("linear_sequence_loss", {"forward": "group_slabs"}, {"slab_rows": 128, "sums": "input"}),
    ("linear_sequence_loss", {"forward": "group_slabs"}, {"slab_rows": 128, "sums": "float32"}),
    ("linear_sequence_loss", {"forward": "vocab_slabs"}, {"slabs": 1}),
    ("linear_sequence_loss", {"forward": "vocab_slabs"}, {"slabs": 4}),
]


@EVERY
@pytest.mark.parametrize("compact", ["on", "off"])
def test_results_do_not_depend_on_the_slabs(name, compact):
    m = p.model(sequences=24, tokens=40, vocab=70)
    run, head = LOSSES[name], Head(compact=compact)
    first = numbers(run, m, head=head)
    for op, names, config in WAYS:
        if config.get("sums") == "float32":
            continue  # there is nothing wider than fp32
        with registry.use(op, names, config):
            torch.testing.assert_close(numbers(run, m, head=head), first, rtol=2e-5, atol=2e-6)
    for budget in (0, 60_000, 1 << 30):
        again = numbers(run, m, head=Head(compact=compact, memory_budget=budget))
        torch.testing.assert_close(again, first, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["dpo", "dpo-nll", "aot", "orpo", "cpo", "simpo"])
def test_results_do_not_depend_on_the_order_of_groups(name):
    m = p.model(sequences=8)
    n = copy.copy(m)
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat([order, order + 4])
    n.hidden, n.ref_hidden, n.target = m.hidden[rows], m.ref_hidden[rows], m.target[rows]
    torch.testing.assert_close(LOSSES[name](m)[0], LOSSES[name](n)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bf16_by_every_way(way):
    op, names, config = way
    m = p.model(sequences=16, tokens=40, hidden=64, vocab=500, dtype=torch.bfloat16)
    exact = p.wide(m)
    truth = numbers(LOSSES["orpo"], exact)
    sums = config.get("sums") == "input"  # of 640 rows in slabs of 128, which is five roundings
    with registry.use(op, names, {**config, "slab_rows": 256} if sums else config):
        mine = numbers(LOSSES["orpo"], m)
    assert mine[0].dtype == torch.float32
    for a, b in zip(mine, truth, strict=True):
        assert ((a.double() - b).norm() / b.norm().clamp_min(1e-3)).item() < 2e-2


class Allocations(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation gives, and the operations that wait."""

    def __init__(self):
        super().__init__()
        self.largest, self.waits = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        name = function.name()
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")):
            self.waits.append(name)
        return result


@EVERY
def test_no_logits_of_all_tokens(name):
    m = p.model(sequences=12, tokens=400, hidden=8, vocab=300, bias=False)
    with Allocations() as seen:
        numbers(LOSSES[name], m, head=Head(memory_budget=2_000_000))
    assert seen.largest <= 12 * 400 * 300 // 2


@EVERY
def test_memory_stays_within_the_budget(name):
    """For one pair of long sequences too: its logits are four times the budget."""
    m = p.model(sequences=2, tokens=4096, hidden=8, vocab=512, bias=False)
    whole = 2 * 4096 * 512 * 4
    run, budget = LOSSES[name], whole // 4
    with Live() as live:
        loss, _ = run(m, head=Head(memory_budget=budget))
        torch.autograd.grad(loss, p.leaves(m))
    inputs = 2 * 4096 * (8 + 12) * 4
    assert live.peak <= budget + 4 * inputs


@EVERY
def test_no_waiting_for_the_device(name):
    m = p.model()
    with Allocations() as seen:
        numbers(LOSSES[name], m, head=Head(compact="off"))
    assert not seen.waits


def test_the_reference_is_one_call_and_saves_nothing(monkeypatch):
    calls = []
    get = registry.get

    def counted(op, **told):
        handle = get(op, **told)

        def call(*args, **kwargs):
            calls.append((op, args[0].shape[0], torch.is_grad_enabled()))
            return handle(*args, **kwargs)

        return call

    monkeypatch.setattr(registry, "get", counted)
    m = p.model()
    m.ref_weight.requires_grad_()
    numbers(LOSSES["dpo"], m)
    assert calls == [("linear_logp", 6, False), ("linear_sequence_loss", 6, True)]
    assert m.ref_weight.grad is None


def test_dropping_ignored_tokens_waits_once(monkeypatch):
    """What a GPU would be waited for: reading a tensor on the host, and operations whose result's size is data."""
    waits = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(w in function.name() for w in ("scalar_dense", "::nonzero", "bincount", "masked_select", "unique")):
                waits.append(function.name())
            return function(*args, **(kwargs or {}))

    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
        known = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, known=known, name=name: waits.append(name) or known(t))
    target = torch.zeros(6 * 10, dtype=torch.int64)
    target[5:27] = -100
    with Sizes():
        groups = Groups.of(target, 2, 10, -100, "on", 0)
        assert [s for _, s in groups.slabs(20)]
        groups.rows(target.device)
    assert waits == ["tolist", "aten::nonzero_static"]  # whose size is given
    waits.clear()
    with Sizes():
        assert Groups.of(target, 2, 10, -100, "off", 0).kept is None
    assert not waits
