"""``cross_entropy`` on a GPU: values, confident rows, sizes beyond 2^31, memory, graphs, determinism."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import torch.nn.functional as F

from liger_registry import registry


def made(rows, vocab, dtype=torch.bfloat16):
    logits = (2 * torch.randn(rows, vocab, device="cuda")).to(dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")
    target[1::5] = -100
    return logits, target


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(5, 70000), (513, 50257), (64, 128256), (9, 41), (20000, 3)])
def test_values_and_gradients_are_torchs_in_float64(rows, vocab):
    logits, target = made(rows, vocab)
    leaf = logits.detach().double().requires_grad_()
    for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
        loss = registry.get("cross_entropy")(logits, target, **options)
        right = F.cross_entropy(leaf, target, **options)
        torch.testing.assert_close(loss.double(), right, rtol=2e-6, atol=1e-6)
        (got,) = torch.autograd.grad(loss, logits)
        (wanted,) = torch.autograd.grad(right, leaf)
        assert float((got.double() - wanted).norm() / wanted.norm()) < 2.0**-8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_confident_rows_keep_their_gradient(dtype):
    for share in (0.9, 0.99, 0.999):
        logits = torch.zeros(1, 32000, dtype=dtype, device="cuda")
        logits[0, 7] = math.log(share / (1 - share) * 31999)
        logits.requires_grad_()
        p = torch.softmax(logits.detach().double(), -1)[0, 7]
        loss = registry.get("cross_entropy")(logits, torch.tensor([7], device="cuda"))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert abs(float(gradient[0, 7]) / float(p - 1) - 1) < 0.005


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_more_than_two_to_the_31_elements_in_place():
    rows, vocab = 16800, 128256  # 2.15e9 elements, 4.3 GB
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, -1] = 20.0
    target = torch.full((rows,), vocab - 1, device="cuda")
    leaf = logits.requires_grad_()
    loss = registry.get("cross_entropy")(leaf, target, reduction="none", in_place=True)
    assert abs(float(loss[0].detach()) - math.log(vocab)) < 1e-4
    rest = math.log(vocab - 1) - 20
    assert abs(float(loss[-1].detach()) - math.log1p(math.exp(rest))) < 1e-5
    before = torch.cuda.memory_allocated()
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.cuda.memory_allocated() - before < 1 << 28
    wrong = -1 / (1 + math.exp(-rest))
    assert abs(float(gradient[-1, -1]) / wrong - 1) < 0.005


@pytest.mark.gpu
def test_captured_in_a_graph_and_equal_bits():
    logits, target = made(300, 50257)
    call = registry.get("cross_entropy")

    def step():
        loss = call(logits, target, label_smoothing=0.1)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = step()
        second = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        target.copy_(target.roll(1))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_a_target_that_is_no_class_is_nan():
    logits, target = made(20, 128256)
    target[2], target[3] = 128256, -7
    loss = registry.get("cross_entropy")(logits, target, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [2, 3]
