"""softmax: its reference is torch's own, and both faces compute it and its gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import registry
from liger_registry.accuracy import judge
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.ops.softmax import DTYPES, OP
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.tuning.cases import evaluate

INF = float("inf")


def test_the_value_by_hand():
    y = OP.reference(torch.tensor([[0.0, 3.0]], dtype=torch.float64).log())
    assert torch.equal(y, torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    assert torch.equal(OP.reference(torch.zeros(2, 4)), torch.full((2, 4), 0.25))


def test_gradcheck_in_float64():
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(OP.reference, (x,))
    y, dy = OP.reference(x), torch.randn(3, 2, 5, dtype=torch.float64)
    (right,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(OP.schemes[0].backward(dy, y.detach(), needs=(True,))[0], right)
    assert OP.schemes[0].backward(dy, y.detach(), needs=(False,)) == (None,)


PROBLEMS = st.builds(
    lambda rows, width, x, phase: OP.problem(
        OP.describe((torch.empty(rows, width, dtype=getattr(torch, x), device="meta"),), {}), phase, "default", (True,)
    ),
    st.integers(0, 300),
    st.integers(1, 99),
    st.sampled_from(DTYPES),
    st.sampled_from([FORWARD, BACKWARD]),
)


@given(PROBLEMS, st.sampled_from(STYLES), st.sampled_from(["cpu", "meta"]))
def test_an_example_of_a_problem_is_that_problem(problem, style, device):
    inputs = OP.example(problem, device, 3, style)
    OP.validate(inputs, {})
    needs = OP.needs(problem) if problem.phase == BACKWARD else ()
    assert OP.problem(OP.describe(inputs, {}), problem.phase, "default", needs) == problem
    assert OP.has(problem)


@given(PROBLEMS)
def test_magnitudes_and_allocations_have_the_shapes_of_results(problem):
    (x,) = OP.example(problem, "cpu")
    (y,) = OP.schemes[0].reference(x)
    sizes = OP.magnitude((x.double(),), (torch.ones_like(y.double()),), {})
    assert {name: size.shape for name, size in sizes.items()} == {"y": x.shape, "grad_x": x.shape}
    (empty,) = OP.schemes[0].allocate(x)
    assert (empty.shape, empty.dtype, empty.stride()) == (y.shape, y.dtype, y.stride())
    for dims in OP.proxies(problem):
        assert 0 < dims["rows"] <= 261


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.ones(()), InvalidInputError),
        (torch.ones(3, 0), InvalidInputError),
        (torch.ones(3, 4).int(), UnsupportedDtypeError),
        (torch.ones(3, 4).to(torch.float8_e4m3fn), UnsupportedDtypeError),
    ],
)
def test_inputs_that_contradict_the_contract(x, error):
    with pytest.raises(error, match=r"(?s)softmax.*(width >= 1|cast x)"):
        registry.get("softmax")(x)


def test_options_that_are_refused():
    with pytest.raises(UnsupportedOptionError):
        registry.get("softmax")(torch.ones(2, 2), dim=-1)


@pytest.mark.parametrize("implementation", ["eager", "functional", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_values_and_gradients_against_float64(implementation, dtype):
    handle = registry.get("softmax", implementation=implementation)
    for shape in ((37, 96), (2, 3, 5, 7), (9,), (5, 1)):
        x = fill(shape, dtype, "cpu", 0).requires_grad_()
        before, dy = x.detach().clone(), fill(shape, dtype, "cpu", 5)
        y = handle(x)
        got = [y.detach(), *torch.autograd.grad(y, x, dy, retain_graph=True)]
        (again,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(got[1], again)
        truth, formula = (evaluate(OP, (x.detach(),), {}, (dy,), d) for d in (torch.float64, None))
        sizes = OP.magnitude((before.double(),), (dy.double(),), {})
        for key, result in zip(truth, got, strict=True):
            verdict = judge(key, result, truth[key], formula[key], sizes[key], shape[-1])
            assert verdict.passed, str(verdict)
        assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("implementation", ["eager", "functional"])
def test_masked_rows_are_what_torch_gives(implementation):
    x = torch.randn(4, 6)
    x[0], x[1, :3], x[2, 4], x[3, 5] = -INF, -INF, INF, float("nan")
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, right, dy = registry.get("softmax", implementation=implementation)(ours), torch.softmax(theirs, -1), x.exp()
    torch.testing.assert_close(y, right, equal_nan=True)
    y.backward(dy)
    right.backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("implementation", ["eager", "functional"])
def test_views_keep_the_layout_that_the_contract_gives(implementation):
    handle = registry.get("softmax", implementation=implementation)
    for x in (torch.randn(6, 4).t(), torch.randn(2, 3, 8).transpose(0, 1), torch.randn(1, 8).expand(5, 8)):
        y = handle(x)
        assert y.stride() == OP.schemes[0].allocate(x)[0].stride()
        torch.testing.assert_close(y, torch.softmax(x, -1))


def test_opcheck():
    registry.get("softmax")
    x = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.liger_registry.softmax_forward, (x, ""))


@pytest.mark.ci
def test_compiled_in_one_graph():
    handle = registry.get("softmax")
    compiled = torch.compile(lambda x: handle(x * 2) + handle(x.flip(-1)), fullgraph=True)
    x = torch.randn(6, 8, requires_grad=True)
    y, right = compiled(x), torch.softmax(x * 2, -1) + torch.softmax(x.flip(-1), -1)
    torch.testing.assert_close(y, right)
    found, correct = (torch.autograd.grad(t.square().sum(), x) for t in (y, right))
    torch.testing.assert_close(found, correct)
