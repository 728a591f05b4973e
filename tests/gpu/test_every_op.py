"""Promises for every operation that only a GPU can break: graphs, streams, misaligned views, reads by the host,
compiles for new lengths, devices and memory."""

from __future__ import annotations

import contextlib
import gc

import every_op
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry

ONE = every_op.calls("bfloat16")
ALL = every_op.calls("bfloat16", every=True)
# PyTorch's own remark where a backward thread makes the first product of a process.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
IN_PLACE = [c for c in ALL if any(c.options[option] for option in c.op.overwrites.values())]
PURE = [c for c in ALL if c not in IN_PLACE]


def close(mine, right):
    for a, b in zip(mine, right, strict=True):
        if a is None or b is None:
            assert a is None or not a.any()
            assert b is None or not b.any()
        elif b.is_floating_point():
            scale = b.double().abs().max().item() if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b.double(), rtol=3e-2, atol=3e-2 * max(scale, 1e-3), equal_nan=True)


def weights_of(call, outputs):
    return [torch.rand_like(y) + 0.5 for y in call.differentiable_outputs(outputs)]


def step(call, inputs, weights=None, **changes):
    outputs = call.run(inputs, **changes)
    roots = call.differentiable_outputs(outputs)
    weights = weights_of(call, outputs) if weights is None else weights
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    return outputs, torch.autograd.grad(roots, leaves, weights, allow_unused=True)


def exact(call, inputs, weights):
    wide = tuple(
        t.detach().double().requires_grad_(t.requires_grad) if t is not None and t.is_floating_point() else t
        for t in inputs
    )
    outputs = call.right(wide)
    roots = call.differentiable_outputs(outputs)
    leaves = [t for t in wide if t is not None and t.requires_grad]
    return outputs, torch.autograd.grad(roots, leaves, [w.double() for w in weights], allow_unused=True)


def keeps_out(call):
    """Options under which the one allowed read by the host does not happen."""
    return {"compact": "off"} if "compact" in call.options else {}


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("call", PURE, ids=str)
def test_a_graph_of_forward_and_backward_replays_with_new_values(call):
    # Of other leaves: the first use of a leaf ties it to a stream, which may not be the legacy one here.
    weights = weights_of(call, call.run(call.inputs("cuda")))
    inputs = call.inputs("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(call, inputs, weights)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, grads = step(call, inputs, weights)
    fresh = call.inputs("cuda", seed=77)
    with torch.no_grad():
        for old, new in zip(inputs, fresh, strict=True):
            if old is not None:
                old.copy_(new)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    right, expected = step(call, inputs, weights)
    for a, b in zip((*outputs, *grads), (*right, *expected), strict=True):
        assert (a is None and b is None) or torch.equal(a.isnan(), b.isnan())
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("call", ONE, ids=str)
def test_two_streams_at_once(call):
    inputs = call.inputs("cuda")
    weights = weights_of(call, call.run(inputs))
    _, right = step(call, inputs, weights)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(step(call, inputs, weights)[1])
    torch.cuda.synchronize()
    for got in found:
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize("call", ALL, ids=str)
def test_misaligned_views_after_aligned_calls_of_the_same_shape(call):
    if call in IN_PLACE:
        views = [t if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in call.inputs("cuda")]
    else:
        views = list(call.inputs("cuda"))
    weights = weights_of(call, call.run(call.inputs("cuda")))
    right, expected = exact(call, call.inputs("cuda"), weights)
    for offset in (0, 1, 0, 3):
        moved = []
        for tensor in views:
            if tensor is None or not tensor.is_floating_point():
                moved.append(tensor)
                continue
            flat = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")
            view = flat[offset:].view(tensor.shape)
            view.copy_(tensor.detach())
            moved.append(view.detach().requires_grad_(tensor.requires_grad))
        outputs, grads = step(call, tuple(moved), weights)
        close([y.detach() for y in outputs], [y.detach() for y in right])
        close(grads, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("call", ALL, ids=str)
def test_the_host_reads_nothing_and_waits_for_nothing(call):
    changes = keeps_out(call)
    weights = weights_of(call, call.run(call.inputs("cuda"), **changes))
    step(call, call.inputs("cuda"), weights, **changes)
    inputs = call.inputs("cuda")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(call, inputs, weights, **changes)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", ONE, ids=str)
def test_twenty_lengths_compile_at_most_twice(call):
    from triton.runtime.jit import JITFunction

    buckets = [n for n, kind in call.op.dims.items() if kind.value == "bucket"]
    compiled = []
    original = JITFunction._do_compile

    def counted(self, key, signature, device, constexprs, options, *rest, **more):
        compiled.append((self.fn.__name__, str(constexprs), str(options)))
        return original(self, key, signature, device, constexprs, options, *rest, **more)

    def at(rows):
        problem = call.problem.having(**dict.fromkeys(buckets, rows))
        return every_op.Call(call.op, problem, call.text)

    JITFunction._do_compile = counted
    try:
        for rows in range(1100, 1120):
            other = at(rows)
            step(other, other.inputs("cuda"))
    finally:
        JITFunction._do_compile = original
    assert all(compiled.count(one) <= 2 for one in set(compiled)), compiled


@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", ONE, ids=str)
def test_inductor_in_one_graph(call):
    torch.compiler.reset()
    compiled = torch.compile(lambda *tensors: call.run(tensors), fullgraph=True)
    weights = weights_of(call, call.run(call.inputs("cuda")))
    mine, right = call.inputs("cuda"), call.inputs("cuda")
    outputs = compiled(*mine)
    leaves = [t for t in mine if t is not None and t.requires_grad]
    grads = torch.autograd.grad(call.differentiable_outputs(outputs), leaves, weights, allow_unused=True)
    expected, theirs = step(call, right, weights)
    close([y.detach() for y in outputs], [y.detach() for y in expected])
    close(grads, theirs)


@pytest.mark.parametrize("call", ONE, ids=str)
def test_deterministic_mode_gives_equal_bits(call):
    weights = weights_of(call, call.run(call.inputs("cuda")))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [step(call, call.inputs("cuda"), weights)[1] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def measured(function):
    """What a call returns, and the peak of memory it took beyond what was there before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.timeout(300)
def test_the_fused_loss_stays_within_its_budget_beyond_the_gradients():
    tokens, hidden, vocab = 8192, 4096, 128256
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_()
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    target = torch.randint(vocab, (tokens,), device="cuda")
    op = registry.op("fused_linear_cross_entropy")
    handle = registry.get("fused_linear_cross_entropy")

    def run():
        loss = handle(x, weight, target)
        loss.backward()
        return loss

    x.grad = weight.grad = None
    with contextlib.suppress(AttributeError):
        run()
    x.grad = weight.grad = None
    loss, peak = measured(run)
    own = x.grad.numel() * 2 + weight.grad.numel() * 2
    tensors, options = op.bind((x, weight, target), {})
    budget = op.budget(op.problem(op.describe(tensors, options), "backward", op.schemes[0].name, (True, True, False)))
    print(
        f"peak {peak / 2**30:.2f} GiB, gradients {own / 2**30:.2f}, budget {budget / 2**30:.2f}; loss {loss.item():.4f}"
    )
    assert peak <= own + budget + (8 << 20)
    right = torch.nn.functional.cross_entropy((x[:512] @ weight.T).float(), target[:512], reduction="none")
    mine = handle(x[:512], weight, target[:512], reduction="none")
    torch.testing.assert_close(mine.float(), right, rtol=2e-2, atol=2e-2)
