"""``rms_norm`` through the public face on a GPU: values, streams, graphs, compile, and what may not happen in a
step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import Catalog, Device, registry
from liger_registry.accuracy import judge
from liger_registry.implementation import OWN_DISTRIBUTION
from liger_registry.ops.rms_norm import OP
from liger_registry.store import TableStore
from liger_registry.tuning.tuner import tune


def tensors(rows=64, hidden=4096, dtype=torch.bfloat16, weight_dtype=None):
    x = torch.randn(rows, hidden, device="cuda", dtype=dtype, requires_grad=True)
    w = (1 + 0.1 * torch.randn(hidden, device="cuda")).to(weight_dtype or dtype).requires_grad_()
    return x, w


def check(x, w, dy=None, handle=None, **options):
    """Value and gradients of a call by the accuracy rule, the truth in float64."""
    handle = handle or registry.get("rms_norm")
    inputs = [x] if w is None else [x, w]
    y = handle(x, w, **options)
    dy = torch.randn_like(y) if dy is None else dy
    got = [y, *torch.autograd.grad(y, inputs, dy)]
    filled = {o.name: options.get(o.name, o.default) for o in OP.options}

    def formula(cast):
        leaves = [cast(t.detach()).requires_grad_() for t in inputs]
        out = OP.reference(*leaves, *([None] if w is None else []), **filled)
        return [out.detach(), *torch.autograd.grad(out, leaves, cast(dy))]

    truth, own = formula(torch.Tensor.double), formula(lambda t: t)
    wide = tuple(t.detach().double() for t in inputs) + ((None,) if w is None else ())
    sizes = OP.magnitude(wide, (dy.double(),), filled)
    for name, result, right, plain in zip(("y", "grad_x", "grad_weight"), got, truth, own, strict=False):
        verdict = judge(
            name, result, right, plain, sizes[name], x.shape[-1] if name != "grad_weight" else x[..., 0].numel()
        )
        assert verdict.passed, (tuple(x.shape), x.dtype, options, str(verdict))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 3, 41, 128, 1536, 4096, 16384, 70000])
def test_values(hidden, dtype, casting):
    x, w = tensors(37, hidden, dtype)
    check(x, w, casting=casting, offset=1.0 if casting == "gemma" else 0.0)


def test_shapes_layouts_and_mixed_dtypes():
    x, w = tensors(70_001, 128)
    check(x, w)  # more rows than a grid's y or z has
    check(*tensors(5, 64, torch.bfloat16, torch.float32))
    check(x[:64], None)
    heads = torch.randn(2, 33, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    check(heads, w)
    check(heads, w, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(heads.shape))
    check(torch.randn(2, 2, 2, 3, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True), w)
    empty = torch.empty(0, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = registry.get("rms_norm")(empty, w)
    dx, dw = torch.autograd.grad(y.sum(), (empty, w))
    assert dx.shape == (0, 128)
    assert torch.equal(dw, torch.zeros_like(dw))


def test_more_than_two_to_the_31_elements():
    rows = (1 << 31) // 4096 + 7
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    y = registry.get("rms_norm")(x, w)
    (dx,) = torch.autograd.grad(y, x, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(y.shape))
    for part in (slice(0, 3), slice(rows - 5, rows)):
        leaf = x.detach()[part].clone().requires_grad_()
        right = OP.reference(leaf, w)
        torch.testing.assert_close(y.detach()[part], right.detach())
        (expected,) = torch.autograd.grad(right, leaf, torch.ones_like(right))
        torch.testing.assert_close(dx[part], expected, rtol=2e-2, atol=2e-2)


def test_a_misaligned_view_after_an_aligned_call_of_the_same_shape():
    flat = torch.randn(16 * 1024 + 8, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 1, 3, 8):
        x = flat[offset : offset + 16 * 1024].view(16, 1024).detach().requires_grad_()
        check(x, w.clone().requires_grad_())


def test_two_streams_at_once():
    x, w = tensors(4096, 4096)
    norm = registry.get("rms_norm")
    right = torch.autograd.grad(norm(x, w).float().square().sum(), (x, w))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(torch.autograd.grad(norm(x, w).float().square().sum(), (x, w)))
    torch.cuda.synchronize()
    for got in found:
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


# The leaves were made on the default stream, and autograd minds; no gradient is accumulated here.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_cuda_graph_of_forward_and_backward():
    x, w = tensors(256, 4096)
    dy = torch.randn_like(x)
    norm = registry.get("rms_norm")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(norm(x, w), (x, w), dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    expected = norm(x, w)
    right = torch.autograd.grad(expected, (x, w), dy)
    assert torch.equal(y, expected)
    assert torch.equal(dx, right[0])
    assert torch.equal(dw, right[1])


def test_a_miss_during_capture_compiles_nothing_and_is_right(monkeypatch):
    import triton

    hidden = 1000 + 7  # no other test's
    x, w = tensors(64, hidden)
    dy = torch.randn_like(x)
    norm = registry.get("rms_norm")
    OP.reference(x, w)  # loads PyTorch's own kernels, and autograd's
    torch.autograd.grad(OP.reference(x, w), (x, w), dy)
    torch.cuda.synchronize()
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", lambda *a, **k: pytest.fail("compiled"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
    graph.replay()
    torch.cuda.synchronize()
    right = OP.reference(x, w)
    torch.testing.assert_close(y, right)
    expected = torch.autograd.grad(right, (x, w), dy)
    torch.testing.assert_close(dx, expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dw, expected[1], rtol=2e-2, atol=2e-1)


def test_twenty_lengths_compile_at_most_twice():
    from triton.runtime.jit import JITFunction

    compiled = []
    original = JITFunction._do_compile

    def counted(self, *args, **kwargs):
        compiled.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    JITFunction._do_compile = counted
    try:
        w = torch.randn(2056, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        norm = registry.get("rms_norm", implementation={"forward": "row", "backward": "persistent"})
        for rows in range(1000, 1020):
            x = torch.randn(rows, 2056, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            torch.autograd.grad(norm(x, w).sum(), (x, w))
    finally:
        JITFunction._do_compile = original
    assert all(compiled.count(name) <= 2 for name in set(compiled)), compiled


@pytest.mark.timeout(300)
def test_inductor_in_one_graph():
    norm = registry.get("rms_norm")
    compiled = torch.compile(lambda x, w: norm(x * 2, w).relu(), fullgraph=True)
    x, w = tensors(64, 1024)
    got = torch.autograd.grad(compiled(x, w).float().sum(), (x, w))
    right = torch.autograd.grad(norm(x * 2, w).relu().float().sum(), (x, w))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_deterministic_mode_gives_equal_bits():
    x, w = tensors(3000, 1024)
    dy = torch.randn_like(x)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(registry.get("rms_norm")(x, w), (x, w), dy) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def catalog(names, order):
    made, op = Catalog(), dataclasses.replace(OP, order=order)
    with made.stage(OWN_DISTRIBUTION) as staging:
        staging.register(op)
        for item in registry.catalog.implementations("rms_norm"):
            if item.id in names:
                staging.register(item)
    return made


@pytest.mark.timeout(300)
def test_a_slow_default_is_replaced_and_a_best_one_stays(tmp_path):
    device = Device.default()
    forward = OP.problem(OP.describe(tensors(8192, 4096), {"casting": "llama"}), "forward", "default")
    names = {"any:eager", "any:functional"}
    options = {"device": device, "isolate": False}
    slow = catalog(names, {"forward": ("eager", "functional"), "backward": ("eager",)})
    (row,) = tune([forward], catalog=slow, store=TableStore(tmp_path / "slow"), **options).rows
    assert (row.status, row.choice.implementation, row.default.implementation) == (
        "tuned",
        "any:functional",
        "any:eager",
    )
    assert row.speedup > 1.5
    best = catalog(names, {"forward": ("functional", "eager"), "backward": ("eager",)})
    (row,) = tune([forward], catalog=best, store=TableStore(tmp_path / "best"), **options).rows
    assert row.status in ("default", "noisy")  # noisy where other tests share the device
    assert row.choice.implementation == "any:functional"


def test_preloading_leaves_nothing_to_compile(monkeypatch):
    from triton.runtime.jit import JITFunction

    shapes = [(512, 3072), (512, 96)]
    problems = []
    for rows, hidden in shapes:
        described = OP.describe(tensors(rows, hidden), {"casting": "llama"})
        problems += [
            OP.problem(described, "forward", "default"),
            OP.problem(described, "backward", "default", (True, True)),
        ]
    plan = registry.freeze(problems=problems, compile=True)
    try:
        assert len(plan) == len(problems)
        monkeypatch.setattr(JITFunction, "_do_compile", lambda *a, **k: pytest.fail("compiled in a step"))
        norm = registry.get("rms_norm")
        for rows, hidden in shapes:
            x, w = tensors(rows, hidden)
            torch.autograd.grad(norm(x, w), (x, w), torch.randn_like(x))  # an expanded gradient is another kernel
            assert norm.explain(x, w)[0].decision.source == "plan"
    finally:
        registry.thaw()
