"""Losses over a linear head on a GPU: numbers, memory, capture, and slabs of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from linear_losses import error, head, wide

from liger_registry import Config, Device, registry
from liger_registry.kernels.linear_products import cut_slab, logits_into, new_slab
from liger_registry.ops import _linear
from liger_registry.tuning.cases import make_case
from liger_registry.tuning.verify import run_case

pytestmark = pytest.mark.gpu
OPS = ("fused_linear_cross_entropy", "linear_logp")


def on_gpu(tensors, grad=True):
    return [None if t is None else t.detach().cuda().requires_grad_(grad and t.is_floating_point()) for t in tensors]


def scalar(found):
    return found if found.dim() == 0 else found.mean()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers(name, dtype):
    inputs = on_gpu(head((4, 600), 256, 5003, dtype, bias=True, size=0.1))
    exact = wide(inputs)
    right = torch.autograd.grad(scalar(registry.op(name).reference(*exact)), [exact[0], exact[1], exact[3]])
    formula = torch.autograd.grad(scalar(registry.op(name).reference(*inputs)), [inputs[0], inputs[1], inputs[3]])
    for compact in ("on", "off"):
        found = registry.get(name)(*inputs, compact=compact)
        mine = torch.autograd.grad(scalar(found), [inputs[0], inputs[1], inputs[3]])
        floor = 2e-6 if dtype == torch.float32 else 0.0
        for ours, theirs, value in zip(mine, formula, right, strict=True):
            assert error(ours, value) <= max(1.5 * error(theirs, value), floor)


@pytest.mark.parametrize("name", OPS)
def test_a_capture_replays_other_values(name):
    inputs = on_gpu(head(4096, 256, 8192, torch.bfloat16))
    handle = registry.get(name)

    def step():
        loss = scalar(handle(*inputs[:3]))
        gradients = torch.autograd.grad(loss, inputs[:2])
        return loss.detach(), *gradients  # autograd minds leaves whose graph another stream keeps

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs[0].copy_(torch.randn_like(inputs[0]))
        inputs[2].random_(0, 8192)
        inputs[2][::3] = -100
    graph.replay()
    for ours, theirs in zip(captured, step(), strict=True):
        assert error(ours, theirs) < 5e-3


def test_peak_memory_of_the_usual_slabs():
    tokens, hidden, vocab = 8192, 4096, 128256
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    target = torch.randint(vocab, (tokens,), device="cuda")
    for name, most in (("fused_linear_cross_entropy", 1.6), ("linear_logp", 1.7)):
        handle = registry.get(name)
        scalar(handle(states, weight, target)).backward()
        states.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scalar(handle(states, weight, target)).backward()
        assert (torch.cuda.max_memory_allocated() - before) / 2**30 <= most, name
        states.grad = weight.grad = None


@pytest.mark.slow
def test_slabs_of_more_than_2_to_the_31_elements():
    tokens, hidden, vocab = 20_000, 64, 128_256
    inputs = on_gpu(head(tokens, hidden, vocab, torch.bfloat16, size=0.3))
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    pinned = {"forward": "single"}
    whole = registry.get("fused_linear_cross_entropy", implementation=pinned, memory_budget=1 << 40)
    loss = whole(*inputs, compact="off")
    mine = torch.autograd.grad(loss, wanted)
    slabs = registry.get("fused_linear_cross_entropy", implementation={"forward": "vocab_slabs"}, config={"slabs": 16})
    right = slabs(*inputs, compact="off")
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    for a, b in zip(mine, torch.autograd.grad(right, wanted), strict=True):
        assert error(a, b) < 5e-3


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_forwards_gradients_are_scaled_in_fp32(factor):
    inputs = on_gpu(head(512, 64, 517, torch.bfloat16))
    reference, exact = registry.op("fused_linear_cross_entropy").reference, wide(inputs)
    right = torch.autograd.grad(reference(*exact) * factor, exact[:2])
    formula = torch.autograd.grad(reference(*inputs) * factor, inputs[:2])
    for name in ("scale_unless_one", "scale"):
        handle = registry.get("fused_linear_cross_entropy", implementation={"backward": name})
        found = torch.autograd.grad(handle(*inputs) * factor, inputs[:2])
        # Logits of 16 are rounded by up to 0.03 in bf16, which is in the formula's error too.
        for ours, theirs, value in zip(found, formula, right, strict=True):
            assert error(ours, value) <= 1.5 * error(theirs, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(37, 24, 61), (3, 40, 1537), (300, 16, 41), (1, 41, 1), (2048, 1024, 4099)])
def test_a_bias_is_added_before_the_only_rounding(sizes, dtype):
    """By slabs of any width: a product's library adds a bias before or after rounding, by shape."""
    rows, width, vocab = sizes
    grid = ((torch.randn(shape, device="cuda") * 8).round() / 8 for shape in ((rows, width), (vocab, width), (vocab,)))
    hidden, weight, bias = (t.to(dtype) for t in grid)
    right = (hidden.double() @ weight.double().t() + bias.double()).to(dtype)  # exact in fp32 too
    assert torch.equal(_linear.head(hidden, weight, bias), right)
    for columns in sorted({vocab, -(-vocab // 2), -(-vocab // 8), -(-vocab // 64)}):
        memory = new_slab(hidden, rows, columns)
        for start in range(0, vocab, columns):
            here = slice(start, min(start + columns, vocab))
            slab = cut_slab(memory, rows, here.stop - start)
            logits_into(slab, hidden, weight[here], bias[here])
            assert torch.equal(slab, right[:, here])


@pytest.mark.parametrize("sizes", [(253, 16, 41), (2045, 16, 41), (5, 24, 131), (253, 1024, 4099)])
@pytest.mark.parametrize("name", OPS)
def test_backward_where_few_numbers_are_large(name, sizes):
    """Logits of thousands, in slabs of all widths: one that is rounded another way than in forward is off by 32."""
    op, device = registry.op(name), Device.parse("cuda")
    dims = dict(zip(("tokens", "hidden", "vocab"), sizes, strict=True))
    description = next(d for d in op.odd("bfloat16") if not any(d.flags.get(f) for f in ("softcapped", "entropy")))
    problem = op.problem(description, "backward", "recompute", (True, True, False)).having(**dims)
    (item,) = (i for i in registry.catalog.implementations(name) if (i.name, i.phase) == ("vocab_slabs", "backward"))
    for seed in range(3):
        case = make_case(op, op.scheme("recompute"), problem, "tail", seed, "cuda")
        for slabs in (1, 2, 8, 64):
            assert all(v.passed for v in run_case(op, item, Config(slabs=slabs), case, device)), (seed, slabs)
