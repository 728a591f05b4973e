"""group_norm: its reference against torch's own, and both faces against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import registry
from liger_registry.accuracy import judge
from liger_registry.errors import DeviceMismatchError, InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.ops.group_norm import DTYPES, OP
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.tuning.cases import evaluate, reduced

VECTORS = [*itertools.product([True, False], repeat=2)]


def tensors(shape, dtype=torch.float32, weight=True, bias=True, grad=False):
    x = fill(shape, dtype, "cpu", 0)
    vectors = (fill((shape[1],), dtype, "cpu", 1, scale=0.25) + 1, fill((shape[1],), dtype, "cpu", 2, scale=0.25))
    found = (x, vectors[0] if weight else None, vectors[1] if bias else None)
    return tuple(None if t is None else t.requires_grad_(grad) for t in found)


def test_the_value_by_hand():
    x = torch.tensor([[[1.0, 3.0], [5.0, 7.0], [2.0, 2.0], [4.0, 4.0]]], dtype=torch.float64)
    y, mean, rstd = OP.schemes[0].reference(x, torch.full((4,), 2.0), torch.ones(4), groups=2, eps=0.0)
    assert torch.equal(mean, torch.tensor([[4.0, 3.0]], dtype=torch.float64))
    torch.testing.assert_close(rstd, torch.tensor([[5.0**-0.5, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(y[0, 0], torch.tensor([1 - 6 / 5**0.5, 1 - 2 / 5**0.5], dtype=torch.float64))
    assert torch.equal(y[0, 2:], torch.tensor([[-1.0, -1.0], [3.0, 3.0]], dtype=torch.float64))


@pytest.mark.parametrize(("weight", "bias"), VECTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_formula_is_torchs(dtype, weight, bias):
    tolerance = {torch.bfloat16: 8e-3, torch.float32: 2e-6, torch.float64: 1e-14}[dtype]
    for shape, groups in (((2, 6), 3), ((3, 6, 5), 2), ((2, 8, 4, 3), 8), ((1, 4, 2, 3, 2), 1)):
        x, w, b = tensors(shape, dtype, weight, bias)
        y = OP.reference(x, w, b, groups, 1e-5)
        right = torch.nn.functional.group_norm(x, groups, w, b, 1e-5)
        assert y.dtype == right.dtype
        torch.testing.assert_close(y, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("weight", "bias"), VECTORS)
def test_gradcheck_in_float64(weight, bias):
    inputs = tensors((2, 6, 3), torch.float64, weight, bias, grad=True)
    assert torch.autograd.gradcheck(lambda x, w, b: OP.reference(x, w, b, 3, 1e-3), inputs)


def key_of(batch, channels, groups, spatial, dtypes, phase):
    x, weight, bias = dtypes
    inputs = (
        torch.empty(batch, channels * groups, *spatial, dtype=getattr(torch, x), device="meta"),
        *(None if v is None else torch.empty(channels * groups, dtype=getattr(torch, v), device="meta")
          for v in (weight, bias)),
    )  # fmt: skip
    described = OP.describe(inputs, {"groups": groups})
    return OP.problem(described, phase, "default", (True, weight is not None, bias is not None))


VECTOR = st.sampled_from([None, *DTYPES])
PROBLEMS = st.builds(
    key_of,
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.integers(1, 5), max_size=3),
    st.tuples(st.sampled_from(DTYPES), VECTOR, VECTOR),
    st.sampled_from([FORWARD, BACKWARD]),
)


@given(PROBLEMS, st.sampled_from(STYLES), st.sampled_from(["cpu", "meta"]))
def test_an_example_of_a_problem_is_that_problem(problem, style, device):
    inputs, options = OP.example(problem, device, 3, style), OP.options_of(problem)
    OP.validate(inputs, options)
    needs = OP.needs(problem) if problem.phase == BACKWARD else ()
    assert OP.problem(OP.describe(inputs, options), problem.phase, "default", needs) == problem
    assert OP.has(problem)


@given(PROBLEMS)
def test_magnitudes_and_allocations_have_the_shapes_of_results(problem):
    inputs, options = OP.example(problem, "cpu"), OP.options_of(problem)
    full, empty = (f(*inputs, **options) for f in (OP.schemes[0].reference, OP.schemes[0].allocate))
    assert [(t.shape, t.dtype, t.stride()) for t in empty] == [(t.shape, t.dtype, t.stride()) for t in full]
    wide = tuple(None if t is None else t.double() for t in inputs)
    sizes = OP.magnitude(wide, (torch.ones_like(wide[0]),), options)
    shapes = dict(zip(("y", "mean", "rstd"), (t.shape for t in full), strict=True))
    shapes |= {f"grad_{i.name}": t.shape for i, t in zip(OP.inputs, inputs, strict=True) if t is not None}
    assert {name: size.shape for name, size in sizes.items()} == shapes
    assert set(sizes) <= set(OP.reduced)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "error", "way_out"),
    [
        (torch.ones(4), None, None, InvalidInputError, "spatial"),
        (torch.ones(2, 0, 3), None, None, InvalidInputError, "spatial"),
        (torch.ones(2, 4, 0), None, None, InvalidInputError, "spatial"),
        (torch.ones(2, 5, 3), None, None, InvalidInputError, "divisor"),
        (torch.ones(2, 4, 3), torch.ones(2), None, InvalidInputError, "weight of this layer"),
        (torch.ones(2, 4, 3), None, torch.ones(4, 1), InvalidInputError, "bias of this layer"),
        (torch.ones(2, 4, 3).int(), None, None, UnsupportedDtypeError, "cast x"),
        (torch.ones(2, 4, 3), torch.ones(4).long(), None, UnsupportedDtypeError, "cast weight"),
        (torch.ones(2, 4, 3), torch.ones(4, device="meta"), None, DeviceMismatchError, "one device"),
    ],
)
def test_inputs_that_contradict_the_contract(x, weight, bias, error, way_out):
    with pytest.raises(error, match=f"(?s)group_norm.*{way_out}"):
        registry.get("group_norm")(x, weight, bias, groups=2)


@pytest.mark.parametrize("options", [{"groups": 0}, {"groups": 2.0}, {"eps": -1.0}, {"num_groups": 2}])
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        registry.get("group_norm")(torch.ones(2, 32), **options)


@pytest.mark.parametrize("implementation", ["eager", "functional"])
def test_every_option_changes_the_result(implementation):
    handle = registry.get("group_norm", implementation=implementation)
    x, w, b = tensors((2, 8, 5))
    base = handle(x, w, b, groups=2, eps=1e-5)
    for options in ({"groups": 4, "eps": 1e-5}, {"groups": 2, "eps": 0.5}):
        found = handle(x, w, b, **options)
        assert not torch.equal(base, found)
        torch.testing.assert_close(found, OP.reference(x, w, b, **options))


@pytest.mark.parametrize("implementation", ["eager", "functional", None])
@pytest.mark.parametrize(("weight", "bias"), VECTORS)
def test_values_and_gradients_against_float64(implementation, weight, bias):
    handle, options = registry.get("group_norm", implementation=implementation), {"groups": 2, "eps": 1e-5}
    shapes = ((3, 6, 5, 7), (2, 8), (1, 4, 2, 3, 2))
    for dtype, shape in itertools.product((torch.bfloat16, torch.float16, torch.float32, torch.float64), shapes):
        inputs = tensors(shape, dtype, weight, bias, grad=True)
        plain = tuple(None if t is None else t.detach().clone() for t in inputs)
        y, leaves = handle(*inputs, **options), [t for t in inputs if t is not None]
        dy = fill(shape, dtype, "cpu", 5)
        found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(y, leaves, dy), strict=True))
        truth, formula = (evaluate(OP, plain, options, (dy,), d) for d in (torch.float64, None))
        wide = tuple(None if t is None else t.double() for t in plain)
        sizes = OP.magnitude(wide, (dy.double(),), options)
        problem = OP.problem(OP.describe(plain, options), FORWARD, "default")
        problem = problem.having(batch=shape[0], spatial=math.prod(shape[2:]))
        names = ["y", *(f"grad_{i.name}" for i, t in zip(OP.inputs, inputs, strict=True) if t is not None)]
        for name, result in zip(names, (y.detach(), *found), strict=True):
            verdict = judge(name, result, truth[name], formula[name], sizes[name], reduced(OP, name, problem))
            assert verdict.passed, str(verdict)
        assert all(t is None or torch.equal(t.detach(), p) for t, p in zip(inputs, plain, strict=True))


@pytest.mark.parametrize("implementation", ["eager", "functional"])
@pytest.mark.parametrize("needs", [*itertools.product([True, False], repeat=3)])
def test_only_what_is_needed_is_computed(needs, implementation):
    inputs = [t.requires_grad_(need) for t, need in zip(tensors((2, 4, 3)), needs, strict=True)]
    y = registry.get("group_norm", implementation=implementation)(*inputs, groups=2)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    assert tuple(t.grad is not None for t in inputs) == needs


@pytest.mark.parametrize("implementation", ["eager", "functional"])
def test_views_keep_the_layout_that_the_contract_gives(implementation):
    handle = registry.get("group_norm", implementation=implementation)
    image = torch.randn(2, 6, 4, 5)
    views = [image.to(memory_format=torch.channels_last), image[:, :, 1:3, 1:4], image.transpose(0, 1)[:6, :2]]
    for x in views:
        y = handle(x, groups=2)
        assert y.stride() == OP.schemes[0].allocate(x, None, None, groups=2)[0].stride()
        torch.testing.assert_close(y, torch.nn.functional.group_norm(x.contiguous(), 2, eps=1e-6))


def test_opcheck():
    registry.get("group_norm")
    x, w, b = tensors((2, 4, 3), grad=True)
    forward = torch.ops.liger_registry.group_norm_forward
    torch.library.opcheck(forward, (x, w, b, 2, 1e-5, ""))
    torch.library.opcheck(forward, (x, None, None, 2, 1e-5, ""))


@pytest.mark.ci
def test_compiled_in_one_graph():
    handle, right = registry.get("group_norm"), torch.nn.functional.group_norm
    compiled = torch.compile(lambda x, w, b: handle(x * 2, w, b, groups=2) + handle(x, groups=4), fullgraph=True)
    x, w, b = tensors((2, 4, 3, 3), grad=True)
    y, expected = compiled(x, w, b), right(x * 2, 2, w, b, 1e-6) + right(x, 4, eps=1e-6)
    torch.testing.assert_close(y, expected)
    found, correct = (torch.autograd.grad(t.square().sum(), (x, w, b)) for t in (y, expected))
    for mine, theirs in zip(found, correct, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
