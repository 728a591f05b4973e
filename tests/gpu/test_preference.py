"""Preference, policy and distillation losses on a GPU: numbers, memory, capture, and nothing that waits."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import preference as p
import pytest
import torch
from linear_losses import error
from preference_losses import LOSSES, grpo, numbers

from liger_registry import registry
from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
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


def scaled(run, factor):
    """The loss times a factor, as fp16 is trained."""

    def wrapped(m, **told):
        loss, metrics = run(m, **told)
        return loss * factor, metrics

    return wrapped


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compact", ["on", "off"])
def test_numbers(name, dtype, compact):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=dtype, size=0.2))
    # KTO's gradients of single logits are about 1e-8 here, below the 6e-8 of fp16: without a scale they are 13 % off.
    run = scaled(LOSSES[name], 1024.0 if dtype == torch.float16 else 1.0)
    truth = numbers(run, p.wide(m))
    mine = numbers(run, m, head=Head(compact=compact))
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


def kto_of_two_weights(m, head):
    labels = torch.arange(m.target.shape[0], device=m.target.device) % 3 != 1
    loss = LigerFusedLinearKTOLoss(desirable_weight=1.5, undesirable_weight=0.5, head=head)
    return loss(m.hidden, m.weight, m.target, m.bias, labels)


def distilled(kind):
    def run(m, head):
        loss = kind(return_soft_hard_loss=True, head=head)
        found = loss(m.hidden, m.weight, m.ref_hidden, m.ref_weight, m.target, m.bias, m.ref_bias)
        return found[0], found[1:]

    return run


WAITING = {
    **LOSSES,
    "kto-weights": kto_of_two_weights,
    "jsd": distilled(LigerFusedLinearJSDLoss),
    "cosine": distilled(LigerFusedLinearCosineSimilarityLoss),
    **{
        kind: lambda m, head, kind=kind: grpo(m, head=head, loss_type=kind)
        for kind in ("bnpo", "cispo", "sapo", "luspo", "vespo")
    },
}


@contextmanager
def waiting(mode):
    """Within it every wait for the GPU is an error, or a warning."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", WAITING)
def test_nothing_waits(name):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=torch.bfloat16))
    run, head = WAITING[name], Head(compact="off")
    numbers(run, m, head=head)
    with waiting("error"):
        numbers(run, m, head=head)


@pytest.mark.parametrize(("name", "operations"), [("orpo", 1), ("cpo", 1), ("kto-weights", 1), ("dpo", 2), ("jsd", 1)])
def test_dropping_tokens_waits_once_an_operation(name, operations):
    """Of which a reference that is computed here is one more."""
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=torch.bfloat16))
    run, head = WAITING[name], Head(compact="on")
    numbers(run, m, head=head)
    with waiting("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers(run, m, head=head)
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == operations


@pytest.mark.parametrize("name", WAITING)
def test_a_capture_replays_other_values(name):
    m = on_gpu(p.model(sequences=12, tokens=70, hidden=64, vocab=1003, dtype=torch.bfloat16))
    run, head = WAITING[name], Head(compact="off")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
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


def peak(step, *leaves):
    """GiB that a step takes beyond what is there before it, the gradients that it leaves included."""
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
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
        loss(weight, states, target, None, *more)[0].backward()

    assert peak(lambda: step(orpo), states, weight) <= 1.7
    assert peak(lambda: step(dpo, *ref), states, weight) <= 1.7


def test_one_pair_of_long_sequences_stays_within_the_budget():
    """2 x 8,192 tokens have 3.9 GiB of logits; what is beyond gradients stays within what was asked for."""
    states, weight, target = large(2, 8192, 0.0)
    held = (states.numel() + weight.numel()) * 2 / GIB
    loss = LigerFusedLinearDPOLoss(use_ref_model=False, head=Head(memory_budget=1 << 30))

    assert peak(lambda: loss(weight, states, target)[0].backward(), states, weight) <= 1.0 + held + 0.05


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


@pytest.mark.parametrize("implementation", ["row", "column_split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [32000, 32003])
def test_cosine_of_wide_rows(implementation, dtype, vocab):
    """In the place of strided logits; equal rows are exactly equal, and near ones keep their digits."""
    generator = torch.Generator("cuda").manual_seed(0)
    memory = torch.randn(64, 32064, device="cuda", generator=generator) * 3
    teacher = (memory + torch.randn(64, 32064, device="cuda", generator=generator))[:, :vocab].to(dtype)
    student = memory.to(dtype)[:, :vocab]
    teacher[:8] = student[:8]
    teacher[8:16] = (student[8:16].float() * (1 + 1e-2 * torch.randn(8, vocab, device="cuda"))).to(dtype)
    student[16] = 0
    teacher[17] = 0
    student[18], teacher[18] = torch.nan, torch.inf
    labels = torch.randint(vocab, (64,), device="cuda", generator=generator)
    labels[18] = p.IGNORED
    exact = [t.double() for t in (student, teacher)]
    scale = torch.tensor(4096.0, device="cuda")  # the smallest gradients are 1e-7, where fp16 has no digits
    told = {"soft": 1.0, "hard": 0.0, "cross_entropy": True, "gradient": True}
    right = registry.op("logit_cosine").reference(*exact, labels, scale, **told)
    handle = registry.get("logit_cosine", implementation=implementation)
    found = handle(student, teacher, labels, scale, in_place=True, **told)
    assert found[2].data_ptr() == student.data_ptr()
    distance, nll, slope = (t.double() for t in found)
    assert not distance[:8].any()
    assert not slope[:8].any()
    torch.testing.assert_close(distance, right[0], rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(nll, right[1], rtol=1e-5, atol=0.0)
    for rows in (slice(8, 16), slice(19, None)):
        assert error(slope[rows], right[2][rows]) < (1e-4 if dtype == torch.float32 else 4e-3)
    assert distance[16:19].tolist() == [1.0, 1.0, 0.0]
    assert not slope[16:19].any()


def test_peak_memory_of_the_cosine_with_a_cross_entropy():
    """Two slabs of a quarter of the rows, the gradients, and slack; a third slab would be .49 GiB."""
    states, weight, target = large(ignored=0.0)
    ref = torch.randn_like(states), torch.randn_like(weight) * 0.02
    loss = LigerFusedLinearCosineSimilarityLoss()

    def step():
        loss(states.flatten(0, 1), weight, ref[0].flatten(0, 1), ref[1], target.flatten()).backward()

    held = (states.numel() + weight.numel()) * 2
    slabs = 2 * 2048 * 128256 * 2
    assert peak(step, states, weight) <= (held + slabs) / GIB + 0.1
