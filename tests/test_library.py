"""The ``torch.library`` face: compile without breaks, export, FakeTensor, opcheck."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_registry import get, registry
from liger_registry.errors import InvalidInputError, UnsupportedTransformError
from liger_registry.launch import NotLoaded

HIDDEN = 48


def leaves(rows=6, dtype=torch.float32):
    return torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True), torch.randn(
        HIDDEN, dtype=dtype, requires_grad=True
    )


def graphs(function):
    """The compiled function, and the graphs that Dynamo captured of it."""
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True), seen


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: registry.get("rms_norm")(x, w, eps=1e-5) * 2,
        lambda x, w: get("rms_norm")(x, w, eps=1e-5) * 2,
        lambda x, w: registry.get("rms_norm", implementation="eager")(x, w, eps=1e-5) * 2,
    ],
)
def test_one_graph_forward_and_backward(call):
    x, w = leaves()
    right = torch.autograd.grad(call(x, w).square().sum(), [x, w])
    compiled, seen = graphs(call)
    got = torch.autograd.grad(compiled(x, w).square().sum(), [x, w])
    assert len(seen) == 1
    assert "rms_norm_forward" in seen[0].code
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)


def test_a_handle_made_before_compiles_too():
    norm = registry.get("rms_norm")
    compiled, seen = graphs(lambda x, w: norm(x, weight=w).relu())
    x, w = leaves()
    torch.testing.assert_close(compiled(x, w), norm(x, w).relu())
    assert len(seen) == 1


def test_a_pinned_handle_keeps_its_pin_in_the_graph():
    pinned = registry.get("rms_norm", implementation={"forward": "functional"})
    compiled, seen = graphs(lambda x, w: pinned(x, w))
    x, w = leaves()
    compiled(x, w)
    assert "functional" in seen[0].code


@pytest.mark.ci
def test_inductor_forward_and_backward_and_new_lengths_do_not_recompile():
    norm = registry.get("rms_norm")
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(lambda x, w: norm(x, w).square().sum(), fullgraph=True, dynamic=True)
    for rows in (6, 7, 9, 33):
        x, w = leaves(rows)
        right = torch.autograd.grad(norm(x, w).square().sum(), [x, w])
        got = torch.autograd.grad(compiled(x, w), [x, w])
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def other_strides(x, weight=None, **options):
    """The right results in memory that is laid out by columns."""
    y, rstd = registry.op("rms_norm").schemes[0].reference(x, weight, **options)
    return y.t().contiguous().t(), rstd


def test_results_have_the_strides_that_tracing_promised(monkeypatch):
    norm = registry.get("rms_norm")
    x, w = torch.randn(6, HIDDEN), torch.randn(HIDDEN)
    right = norm(x, w)
    bound = type(registry).bound

    def spy(self, op, phase, scheme, tensors, options, *rest):
        bound(self, op, phase, scheme, tensors, options, *rest)
        return lambda *tensors: other_strides(*tensors, **options)

    monkeypatch.setattr(type(registry), "bound", spy)
    y = torch.ops.liger_registry.rms_norm_forward(x, w, 1e-6, 0.0, "llama", "")[0]
    assert y.stride() == (HIDDEN, 1)
    torch.testing.assert_close(y, right)


def test_launches_that_are_not_loaded_fall_back_in_both_phases(monkeypatch):
    norm = registry.get("rms_norm")
    x, w = leaves()
    right = torch.autograd.grad(norm(x, w).square().sum(), [x, w])

    def refuse(*tensors):
        raise NotLoaded

    monkeypatch.setattr(type(registry), "bound", lambda *args: refuse)
    y = torch.ops.liger_registry.rms_norm_forward(x, w, 1e-6, 0.0, "llama", "")[0]
    got = torch.autograd.grad(y.square().sum(), [x, w])
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_two_values_for_one_argument_are_refused_while_tracing():
    compiled, _ = graphs(lambda x, w: registry.get("rms_norm")(x, w, weight=w))
    with pytest.raises(Exception, match="two values"):
        compiled(*leaves())


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(weight, dtype):
    registry.get("rms_norm")
    x, w = leaves(dtype=dtype)
    options = (1e-6, 0.0, "llama", "")
    w = w if weight else None
    torch.library.opcheck(torch.ops.liger_registry.rms_norm_forward, (x, w, *options))
    rstd = torch.rand(6)
    for needs in ([True, True], [True, False], [False, True]) if weight else ([True, False],):
        args = (torch.randn_like(x), x.detach(), w if w is None else w.detach(), rstd, needs, *options)
        torch.library.opcheck(torch.ops.liger_registry.rms_norm_backward, args)


def test_fake_tensors_have_the_layout_of_real_ones():
    norm = registry.get("rms_norm")
    for shape, permuted in (((2, 3, HIDDEN), False), ((2, 3, 4, HIDDEN), True)):
        real = torch.randn(shape)
        real = real.transpose(1, 2) if permuted else real
        w = torch.randn(HIDDEN)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = norm(mode.from_tensor(real), mode.from_tensor(w))
        y = norm(real, w)
        assert (fake.shape, fake.dtype, fake.stride()) == (y.shape, y.dtype, y.stride())


def test_export():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(HIDDEN))

        def forward(self, x):
            return registry.get("rms_norm")(x, self.weight)

    block, x = Block(), torch.randn(4, HIDDEN)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}})
    assert "rms_norm_forward" in program.graph_module.code
    longer = torch.randn(9, HIDDEN)
    torch.testing.assert_close(program.module()(longer), block(longer))


def test_errors_are_named_while_tracing_too():
    norm = registry.get("rms_norm")
    with FakeTensorMode() as mode, pytest.raises(InvalidInputError):
        norm(mode.from_tensor(torch.randn(4, 8)), mode.from_tensor(torch.randn(9)))


def test_double_backward_through_the_library_face_raises_by_name():
    norm = registry.get("rms_norm")
    x, w = leaves()
    y = torch.ops.liger_registry.rms_norm_forward(x, w, 1e-6, 0.0, "llama", "")[0]
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        first.sum().backward()
    assert norm.op.name == "rms_norm"
