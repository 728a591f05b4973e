"""The contract of relu_squared: the models' activation bit for bit, keys, errors, and both faces of the public call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from liger_registry import registry
from liger_registry.architecture import Architecture
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.ops._gated import DTYPES
from liger_registry.ops.relu_squared import OP
from liger_registry.problem import BACKWARD, FORWARD

IMPLEMENTATIONS = [None, "eager", "functional"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_formula_is_the_models(implementation, dtype):
    scale = 2.0**-9 if dtype == torch.float16 else 1.0  # fp16 holds no larger squares
    for seed, style in enumerate(STYLES):
        x = fill((2, 5, 33), dtype, "cpu", seed, style, scale).requires_grad_()
        dy = fill((2, 5, 33), dtype, "cpu", seed + 1)
        y, right = registry.get("relu_squared", implementation=implementation)(x), ACT2FN["relu2"](x)
        assert torch.equal(y, right)
        (got,), (gradient,) = (torch.autograd.grad(t, x, dy, retain_graph=True) for t in (y, right))
        # autograd rounds 2 relu(x), which is exact, and the product: once, as ours.
        assert torch.equal(got, gradient)
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], got)


def test_values_by_hand():
    x = torch.tensor([-2.0, -0.0, 0.0, 1.5, 3.0, float("nan"), float("inf"), -float("inf")], requires_grad=True)
    y = registry.get("relu_squared")(x)
    expected = torch.tensor([0.0, 0.0, 0.0, 2.25, 9.0, float("nan"), float("inf"), 0.0])
    torch.testing.assert_close(y.detach(), expected, equal_nan=True, rtol=0, atol=0)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.5))
    slopes = torch.tensor([0.0, 0.0, 0.0, 1.5, 3.0, float("nan"), float("inf"), 0.0])
    torch.testing.assert_close(dx, slopes, equal_nan=True, rtol=0, atol=0)


def test_gradcheck_in_float64():
    assert torch.autograd.gradcheck(OP.reference, (torch.randn(4, 5, dtype=torch.float64, requires_grad=True),))


@given(
    st.integers(0, 300), st.integers(1, 99), st.sampled_from(DTYPES), st.sampled_from([FORWARD, BACKWARD]),
    st.sampled_from(["cpu", "meta"]),
)  # fmt: skip
def test_an_example_of_a_problem_is_that_problem(rows, width, dtype, phase, device):
    x = torch.empty(rows, width, dtype=getattr(torch, dtype), device="meta")
    problem = OP.problem(OP.describe((x,), {}), phase, "default", (True,))
    (example,) = OP.example(problem, device, 3, "tail")
    assert OP.problem(OP.describe((example,), {}), phase, "default", (True,)) == problem
    assert OP.has(problem)
    OP.check()
    if device == "cpu":
        (empty,), (full,) = OP.schemes[0].allocate(example), OP.schemes[0].reference(example)
        assert (empty.shape, empty.dtype, empty.stride()) == (full.shape, full.dtype, full.stride())
        sizes = OP.magnitude((example.double(),), (full.double(),), {})
        assert {n: s.shape for n, s in sizes.items()} == {"y": full.shape, "grad_x": full.shape}


def test_what_is_refused():
    handle = registry.get("relu_squared")
    with pytest.raises(InvalidInputError, match=r"(?s)relu_squared.*width >= 1"):
        handle(torch.ones(3, 0))
    with pytest.raises(InvalidInputError, match="relu_squared"):
        handle(torch.ones(()))
    with pytest.raises(UnsupportedDtypeError, match=r"(?s)relu_squared.*cast x"):
        handle(torch.ones(3).int())
    with pytest.raises(UnsupportedOptionError):
        handle(torch.ones(3), in_place=True)


def test_calls_are_what_models_do():
    def calls(activation, **more):
        model = Architecture("x", "nemotron", 64, intermediate=96, activation=activation, **more)
        return {(d.dims.rows, d.dims.width) for d in OP.calls(model, 512, "bfloat16")}

    assert calls("relu2") == {(512, 96)}
    assert calls("silu") == set()
    assert calls("relu2", experts=8, experts_per_token=2) == {(1024, 96), (128, 96)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_views_keep_the_layout_that_the_contract_gives(implementation):
    handle = registry.get("relu_squared", implementation=implementation)
    for x in (torch.randn(8, 5).t(), torch.randn(1, 8).expand(5, 8), torch.randn(2, 3, 4, 8).transpose(1, 2)):
        y = handle(x)
        assert y.stride() == OP.schemes[0].allocate(x)[0].stride()
        assert torch.equal(y, OP.reference(x))


def test_opcheck_and_compile():
    handle, x = registry.get("relu_squared"), torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.liger_registry.relu_squared_forward, (x, ""))
    torch.library.opcheck(torch.ops.liger_registry.relu_squared_backward, (x.detach(), x.detach(), [True], ""))
    y = torch.compile(lambda t: handle(t * 2), backend="aot_eager", fullgraph=True)(x)
    (got,), (right,) = (torch.autograd.grad(t.sin().sum(), x) for t in (y, OP.reference(x * 2)))
    torch.testing.assert_close(got, right)
