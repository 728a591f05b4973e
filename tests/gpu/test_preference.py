"""Preference, policy and distillation losses on a GPU: numbers, memory, capture, and nothing that waits."""

from __future__ import annotations

import preference as p
import pytest
import torch
from linear_losses import error
from preference_losses import LOSSES, numbers

from liger_registry import registry
from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearORPOLoss,
)

pytestmark = pytest.mark.gpu
EVERY = pytest.mark.parametrize("name", LOSSES)
GIB = 1 << 30


def on_gpu(m):
    for name, t in vars(m).items():
        if torch.is_tensor(t):
            setattr(m, name, t.detach().cuda().requires_grad_(t.requires_grad))
    return m


def large(sequences=8, tokens=1024, ignored=0.5, vocab=128256, hidden=4096):
    """The size of the benchmark: the first part of every sequence does not count."""

    def random(*shape, scale=1.0):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale

    target = torch.randint(vocab, (sequences, tokens), device="cuda")
    target[:, : int(ignored * tokens)] = p.IGNORED
    states, weight = random(sequences, tokens, hidden), random(vocab, hidden, scale=0.02)
    return states.requires_grad_(), weight.requires_grad_(), target


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compact", ["on", "off"])
def test_numbers(name, dtype, compact):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=dtype, size=0.2))
    truth = numbers(LOSSES[name], p.wide(m))
    mine = numbers(LOSSES[name], m, head=Head(compact=compact))
    limit = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(mine[0].double(), truth[0], rtol=limit, atol=limit)
    for a, b in zip(mine[-3:], truth[-3:], strict=True):
        assert a.dtype == dtype
        assert error(a, b) < limit


@EVERY
def test_the_same_bits_again(name):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=torch.bfloat16))
    first, second = (numbers(LOSSES[name], m) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@EVERY
def test_nothing_waits(name):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=torch.bfloat16))
    run, head = LOSSES[name], Head(compact="off")
    numbers(run, m, head=head)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers(run, m, head=head)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["dpo", "orpo", "cpo", "simpo"])
def test_a_capture_replays_other_values(name):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=torch.bfloat16))
    run, head = LOSSES[name], Head(compact="off")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        numbers(run, m, head=head)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = numbers(run, m, head=head)
    with torch.no_grad():
        m.hidden.copy_(torch.randn_like(m.hidden))
        m.target.random_(0, 1003)
        m.target[:, :20] = p.IGNORED
    graph.replay()
    for mine, right in zip(captured, numbers(run, m, head=head), strict=True):
        assert error(mine, right) < 5e-3


def test_the_heads_gradient_in_bf16():
    m = on_gpu(p.model(sequences=16, tokens=512, hidden=512, vocab=32000, dtype=torch.bfloat16, bias=False, size=0.05))
    run, exact = LOSSES["dpo"], p.wide(m)
    right = numbers(run, exact)[-1]
    tokens = p.logps(m.hidden, m.weight, None, m.target)
    refs = p.logps(m.ref_hidden, m.ref_weight, None, m.target)
    (c, r), (rc, rr) = tokens.float().sum(-1).chunk(2), refs.float().sum(-1).chunk(2)
    eager = torch.autograd.grad(-torch.nn.functional.logsigmoid(0.1 * (c - r - rc + rr)).mean(), m.weight)[0]
    for op, names in (("linear_sequence_loss", "group_slabs"), ("linear_sequence_loss", "vocab_slabs")):
        with registry.use(op, {"forward": names}):
            assert error(numbers(run, m)[-1], right) <= 1.5 * error(eager, right)


def peak(step):
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def test_peak_memory_of_the_usual_slabs():
    states, weight, target = large()
    ref = torch.randn_like(states), torch.randn_like(weight) * 0.02
    orpo, dpo = LigerFusedLinearORPOLoss(), LigerFusedLinearDPOLoss()

    def step(loss, *more):
        states.grad = weight.grad = None
        loss(weight, states, target, None, *more)[0].backward()

    assert peak(lambda: step(orpo)) <= 1.7
    assert peak(lambda: step(dpo, *ref)) <= 1.7


def test_one_pair_of_long_sequences_stays_within_the_budget():
    """2 x 8,192 tokens have 3.9 GiB of logits; what is beyond gradients stays within what was asked for."""
    states, weight, target = large(2, 8192, 0.0)
    held = (states.numel() + weight.numel()) * 2 / GIB
    loss = LigerFusedLinearDPOLoss(use_ref_model=False, head=Head(memory_budget=1 << 30))

    def step():
        states.grad = weight.grad = None
        loss(weight, states, target)[0].backward()

    assert peak(step) <= 1.0 + held + 0.05


@pytest.mark.parametrize("kind", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)])
def test_distillation(kind, dtype, weights):
    m = on_gpu(p.model(sequences=40, tokens=70, hidden=64, vocab=1003, dtype=dtype, size=0.2))
    exact = p.wide(m)
    formula = p.jsd(0.5) if kind is LigerFusedLinearJSDLoss else p.cosine(0.5)
    loss = kind(*weights)(m.hidden, m.weight, m.ref_hidden, m.ref_weight, m.target, m.bias, m.ref_bias)
    truth, _ = p.distilled(exact, formula, *weights)
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(loss.double(), truth, rtol=limit, atol=1e-3)
    for a, b in zip(torch.autograd.grad(loss, p.leaves(m)), torch.autograd.grad(truth, p.leaves(exact)), strict=True):
        assert error(a, b) < limit
