"""``jsd``, ``kl_div``, ``tvd`` and ``fused_linear_jsd`` on a GPU: values, sizes beyond 2^31, graphs, memory."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry
from liger_registry.ops import fused_linear_jsd, jsd, kl_div, tvd

OPS = {"jsd": jsd.OP, "kl_div": kl_div.OP, "tvd": tvd.OP}


def pair(rows, vocab, dtype=torch.bfloat16, probabilities=False):
    made = [torch.randn(rows, vocab, device="cuda").log_softmax(-1) for _ in range(2)]
    x, y = (t.exp() if probabilities else t for t in made)
    return x.to(dtype).requires_grad_(), y.to(dtype)


@pytest.mark.parametrize("implementation", ["row", "tiles"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("name", OPS)
def test_values(name, implementation, reduction):
    for dtype, vocab in ((torch.float32, 41), (torch.bfloat16, 32000)):
        x, y = pair(37, vocab, dtype, name == "tvd")
        labels = torch.arange(37, device="cuda")
        options = {"log_target": True} if name == "kl_div" else {}
        handle = registry.get(name, implementation=implementation)
        loss = handle(x, y, labels, ignore_index=3, reduction=reduction, **options)
        upstream = torch.randn_like(loss)
        (grad,) = torch.autograd.grad(loss, x, upstream)
        wide = x.detach().double().requires_grad_()
        right = OPS[name].reference(wide, y.double(), labels, ignore_index=3, reduction=reduction, **options)
        (expected,) = torch.autograd.grad(right, wide, upstream.double())
        rounded = 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert (loss.double() - right).norm() <= (rounded if name == "jsd" else 1e-5) * right.norm()
        assert (grad.double() - expected).norm() <= rounded * expected.norm()
        assert (grad[3] == 0).all()


@pytest.mark.parametrize("implementation", ["row", "tiles"])
def test_more_than_two_to_the_31_elements(implementation):
    vocab = 32768
    rows = (1 << 31) // vocab + 3
    x = torch.full((rows, vocab), -1.0, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y = x.detach().clone()
    y[-1] = -2.0
    loss = registry.get("kl_div", implementation=implementation)(x, y, log_target=True, reduction="sum")
    # Of all rows the last alone differs: exp(-2) (-2 + 1) an element.
    assert loss.item() == pytest.approx(-vocab * torch.tensor(-2.0).exp().item(), rel=1e-4)
    (grad,) = torch.autograd.grad(loss, x)
    assert grad[0, 0].item() == pytest.approx(-torch.tensor(-1.0).exp().item(), rel=1e-2)
    assert grad[-1, -1].item() == pytest.approx(-torch.tensor(-2.0).exp().item(), rel=1e-2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_cuda_graph_of_forward_and_backward():
    x, y = pair(256, 4096)
    labels = torch.arange(256, device="cuda")
    handle = registry.get("jsd")

    def step():
        loss = handle(x, y, labels, ignore_index=5)
        return loss, *torch.autograd.grad(loss, x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    labels.fill_(5)
    labels[:7] = 0
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


@pytest.mark.parametrize("compact", ["on", "off"])
def test_heads(compact):
    tokens, vocab, hidden = 4101, 32000, 512
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") * hidden**-0.5).bfloat16().requires_grad_()
    teacher = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    teacher_weight = (torch.randn(vocab, 256, device="cuda") * 256**-0.5).bfloat16()
    labels = torch.arange(tokens, device="cuda") % 3
    handle = registry.get("fused_linear_jsd", implementation="chunked")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = handle(states, weight, teacher, teacher_weight, labels, ignore_index=2, compact=compact)
    found = torch.autograd.grad(loss, (states, weight))
    # Two slabs of 2,048 rows, the gradients, and slack; all logits of both would be 525 MB.
    slabs = 2 * 2048 * vocab * 2 + (tokens + vocab) * hidden * 2
    assert torch.cuda.max_memory_allocated() - before < slabs + (96 << 20)
    leaves = states.detach().requires_grad_(), weight.detach().requires_grad_()
    right = fused_linear_jsd.OP.reference(*leaves, teacher, teacher_weight, labels, ignore_index=2)
    expected = torch.autograd.grad(right, leaves)
    torch.testing.assert_close(loss, right, rtol=1e-4, atol=0)
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


@pytest.mark.parametrize("implementation", ["row", "column_split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_column_diverges_by_exactly_nothing(implementation, dtype):
    """A product and a difference are one operation: scaled logits less their rounded maximum would not be 0."""
    vocab = 1 if implementation == "row" else 4096  # less is no case for splits; the other columns count nothing
    student, teacher = (torch.full((1024, vocab), -torch.inf, device="cuda", dtype=dtype) for _ in range(2))
    for logits in (student, teacher):
        logits[:, vocab // 2] = torch.randn(1024, device="cuda").mul(2000).to(dtype)
    options = {"temperature": 1.5, "gradient": True, "beta": 0.3}
    loss, slope = registry.get("logit_divergence", implementation=implementation)(student, teacher, **options)
    assert not loss.any()
    assert not slope.any()
