"""``layer_norm`` and ``fused_add_rms_norm`` through the public face on a GPU; conformance is asked elsewhere."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry
from liger_registry.errors import NoImplementationError
from liger_registry.ops import fused_add_rms_norm, layer_norm

REFERENCES = {"layer_norm": layer_norm.reference, "fused_add_rms_norm": fused_add_rms_norm.reference}
every_op = pytest.mark.parametrize("op", REFERENCES)


def tensors(op, rows, hidden, dtype=torch.bfloat16, device="cuda"):
    """Inputs that need gradients, and the gradients of the outputs."""

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    wide, weight = random(rows, hidden), (1 + 0.1 * torch.randn(hidden, device=device)).to(dtype)
    given = (wide, weight, random(hidden)) if op == "layer_norm" else (wide, random(rows, hidden), weight)
    return [t.requires_grad_() for t in given], [random(rows, hidden) for _ in range(1 if op == "layer_norm" else 2)]


def run(function, given, grads):
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return *outputs, *torch.autograd.grad(outputs, given, grads)


def close(found, exact, tolerance):
    for number, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.isfinite().all(), number
        assert (a.double() - b).norm() <= tolerance * b.norm().clamp_min(1e-30), number


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [3, 41, 128, 1536, 4096, 8192, 16384, 70000])
def test_values(op, hidden, dtype):
    given, grads = tensors(op, 37, hidden, dtype)
    exact = run(REFERENCES[op], [t.detach().double().requires_grad_() for t in given], [g.double() for g in grads])
    close(run(registry.get(op), given, grads), exact, {4: 2e-6, 2: 8e-3}[dtype.itemsize])


@every_op
@pytest.mark.parametrize(("rows", "hidden"), [(16384, 4096), (524288, 128), (8192, 16384)])
def test_every_implementation_at_sizes_of_models(op, rows, hidden):
    given, grads = tensors(op, rows, hidden)
    exact = run(REFERENCES[op], [t.detach().float().requires_grad_() for t in given], [g.float() for g in grads])
    names = {p: {i.name for i in registry.catalog.implementations(op) if i.phase == p and i.capability.vendor != "cpu"}
             for p in ("forward", "backward")}  # fmt: skip
    ran = set()
    for forward in sorted(names["forward"]):
        for backward in sorted(names["backward"]) if forward == "row" else ["persistent"]:
            try:
                handle = registry.get(op, implementation={"forward": forward, "backward": backward})
                found = run(handle, given, grads)
            except NoImplementationError:  # not legal at this size
                continue
            close(found, exact, 8e-3)
            ran |= {forward, backward}
    assert ran > {"row", "persistent"}


@every_op
def test_more_than_two_to_the_31_elements(op):
    rows, hidden = (1 << 31) // 4096 + 7, 4096
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    one = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    # The residual is one row for all: a third tensor of 4 GiB is not what is asked.
    second = (one, None) if op == "layer_norm" else (one.expand(rows, hidden), one)
    outputs = registry.get(op)(x, *second)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grad = torch.linspace(-1, 1, hidden, device="cuda").bfloat16().expand(rows, hidden)
    (dx,) = torch.autograd.grad(outputs, x, [grad] * len(outputs))
    for part in (slice(0, 3), slice(rows - 5, rows)):
        leaf = x.detach()[part].clone().requires_grad_()
        right = REFERENCES[op](leaf, *(t[part] if t is not None and t.dim() == 2 else t for t in second))
        right = right if isinstance(right, tuple) else (right,)
        for a, b in zip(outputs, right, strict=True):
            torch.testing.assert_close(a.detach()[part], b.detach())
        (expected,) = torch.autograd.grad(right, leaf, [grad[part]] * len(right))
        torch.testing.assert_close(dx[part], expected, rtol=2e-2, atol=2e-2)


def test_a_mean_far_from_zero_costs_no_digits():
    x = 8192 + torch.randint(-8, 9, (64, 8192), device="cuda") / 8  # exact in fp32, unlike sums of their squares
    exact = layer_norm.reference(x.double(), eps=1e-12)
    for forward in ("row", "column_split"):
        y = registry.get("layer_norm", implementation={"forward": forward})(x, eps=1e-12)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layer_norm_agrees_with_torchs(dtype):
    (x, weight, bias), _ = tensors("layer_norm", 512, 4096, dtype)
    y, right = registry.get("layer_norm")(x, weight, bias), torch.nn.functional.layer_norm(x, (4096,), weight, bias)
    assert (y != right).float().mean() < 5e-3  # sums in another order now and then move a tie
    torch.testing.assert_close(y, right, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@every_op
def test_two_streams_at_once_and_deterministic(op):
    given, grads = tensors(op, 4096, 4096)
    norm = registry.get(op)
    right = run(norm, given, grads)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            own = [t.detach().requires_grad_() for t in given]  # autograd minds leaves of another stream
            found.append(run(norm, own, grads))
    torch.cuda.synchronize()
    for got in found:
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


# The leaves were made on the default stream, and autograd minds; no gradient is accumulated here.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@every_op
def test_cuda_graph_of_forward_and_backward(op):
    given, grads = tensors(op, 256, 4096)
    norm = registry.get(op)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(norm, given, grads)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(norm, given, grads)
    with torch.no_grad():
        given[0].copy_(torch.randn_like(given[0]))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, run(norm, given, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.timeout(300)
@every_op
def test_inductor_in_one_graph(op):
    norm = registry.get(op)
    given, grads = tensors(op, 64, 1024)

    def call(x, *rest):
        found = norm(x * 2, *rest)
        return tuple(t * 2 for t in (found if isinstance(found, tuple) else (found,)))

    for a, b in zip(run(torch.compile(call, fullgraph=True), given, grads), run(call, given, grads), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
