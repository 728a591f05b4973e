"""``swiglu``, ``geglu`` and ``relu_squared`` on a GPU: conformance, values, sizes beyond 2^31, graphs, and compile."""

from __future__ import annotations

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry
from liger_registry.accuracy import judge
from liger_registry.ops import geglu, relu_squared, swiglu
from liger_registry.testing import conformance_cases
from liger_registry.tuning.cases import evaluate

OPS = {"swiglu": swiglu.OP, "geglu": geglu.OP, "relu_squared": relu_squared.OP}
IMPLEMENTATIONS = ["flat", "rows", "persistent"]
SCALED = {"gate_multiplier": 0.884, "down_multiplier": -1.3}
CALLS = [("swiglu", {}), ("swiglu", SCALED), ("geglu", {}), ("geglu", {"approximate": "none"}), ("relu_squared", {})]


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype).requires_grad_()


def check(name, inputs, options, handle, dy=None):
    """Value and gradients of a call by the accuracy rule, the truth in float64."""
    op, leaves = OPS[name], [t for t in inputs if t is not None]
    filled = {o.name: options.get(o.name, o.default) for o in op.options}
    y = handle(*inputs, **options)
    dy = torch.randn_like(y) if dy is None else dy
    got = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    plain = tuple(None if t is None else t.detach() for t in inputs)
    truth, formula = (evaluate(op, plain, filled, (dy,), dtype) for dtype in (torch.float64, None))
    sizes = op.magnitude(tuple(None if t is None else t.double() for t in plain), (dy.double(),), filled)
    for key, result in zip(truth, got, strict=True):
        verdict = judge(key, result, truth[key], formula[key], sizes[key])
        assert verdict.passed, (name, options, tuple(y.shape), str(verdict))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [c for op in OPS for c in conformance_cases(op, device="cuda")], ids=str)
def test_conformance(case):
    case()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "options"), CALLS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values(implementation, name, options, dtype):
    handle = registry.get(name, implementation=implementation)
    # 40: beyond -88 exponentials are subnormal or zero. fp16 holds no squares of those.
    for width, scale in itertools.product((1, 3, 41, 1536, 14336), (1.0, 8.0 if dtype == torch.float16 else 40.0)):
        inputs = [randn(37, width, dtype=dtype, scale=scale)]
        if name != "relu_squared":
            inputs.append(randn(37, width, dtype=dtype))
        check(name, inputs, options, handle)
        if name != "relu_squared" and implementation != "flat":
            check(name, (randn(37, 2 * width, dtype=dtype, scale=scale), None), options, handle)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_and_mixed_dtypes(implementation):
    handle = registry.get("swiglu", implementation=implementation)
    packed = randn(4, 33, 512)
    check("swiglu", packed.detach().requires_grad_().chunk(2, -1), {}, handle)
    heads = randn(2, 33, 8, 128).detach().transpose(1, 2).requires_grad_()
    check("swiglu", (heads, randn(2, 8, 33, 128)), {}, handle, heads.new_ones(()).expand(heads.shape))
    check("swiglu", (randn(5, 64), randn(5, 64, dtype=torch.float32)), {}, handle)
    flat = torch.randn(16 * 1024 + 8, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 1, 3, 8):  # misaligned after aligned, of one shape
        gate = flat[offset : offset + 16 * 1024].view(16, 1024).detach().requires_grad_()
        check("swiglu", (gate, randn(16, 1024)), {}, handle)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_two_to_the_31_elements(implementation, packed):
    if packed and implementation == "flat":
        implementation = "rows"
    width = 4096
    rows = (1 << 31) // width + 7
    handle = registry.get("swiglu", implementation=implementation)
    gate = torch.randn(rows, width * (1 + packed), device="cuda", dtype=torch.bfloat16).requires_grad_()
    up = None if packed else torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    y = handle(gate, up)
    (dgate,) = torch.autograd.grad(y, gate, y.new_ones(()).expand(y.shape))
    for part in (slice(0, 3), slice(rows - 5, rows)):
        leaf = gate.detach()[part].clone().requires_grad_()
        right = swiglu.OP.reference(leaf, None if up is None else up[part])
        torch.testing.assert_close(y.detach()[part], right.detach(), rtol=1e-2, atol=1e-6)
        (expected,) = torch.autograd.grad(right, leaf, torch.ones_like(right))
        torch.testing.assert_close(dgate[part], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cuda_graph_of_forward_and_backward(implementation):
    handle = registry.get("geglu", implementation=implementation)
    gate, up = randn(256, 4096), randn(256, 4096)
    dy = torch.randn_like(gate)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(handle(gate, up), (gate, up), dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = handle(gate, up)
        found = torch.autograd.grad(y, (gate, up), dy)
    with torch.no_grad():
        gate.copy_(torch.randn_like(gate))
    graph.replay()
    torch.cuda.synchronize()
    expected = handle(gate, up)
    assert torch.equal(y, expected)
    right = torch.autograd.grad(expected, (gate, up), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.timeout(300)
def test_inductor_in_one_graph():
    handle = registry.get("swiglu")
    compiled = torch.compile(lambda g, u: handle(g * 2, u).relu(), fullgraph=True)
    gate, up = randn(64, 1024), randn(64, 1024)
    found = torch.autograd.grad(compiled(gate, up).float().sum(), (gate, up))
    right = torch.autograd.grad(handle(gate * 2, up).relu().float().sum(), (gate, up))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
