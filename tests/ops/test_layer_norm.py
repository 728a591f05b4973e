"""The contract of layer_norm and its PyTorch implementations: torch's own formula, bit for bit, and float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import Device, registry
from liger_registry.architecture import Architecture
from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.op import DimKind
from liger_registry.ops.layer_norm import DTYPES, OP
from liger_registry.portable import layer_norm as portable
from liger_registry.problem import BACKWARD, FORWARD

SCHEME = OP.schemes[0]
CPU = Device.parse("cpu")


def vectors(hidden, dtype, weight=True, bias=True):
    return (
        fill((hidden,), dtype, "cpu", 1, scale=0.25) + 1 if weight else None,
        fill((hidden,), dtype, "cpu", 2, scale=0.25) if bias else None,
    )


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_formula_is_torchs(dtype, weight, bias):
    for seed, (style, hidden) in enumerate(itertools.product(STYLES, (3, 64, 1536))):
        x, dy = fill((2, 5, hidden), dtype, "cpu", seed, style), fill((2, 5, hidden), dtype, "cpu", seed + 1)
        ours, theirs = (leaves(x, *vectors(hidden, dtype, weight, bias)) for _ in range(2))
        mine = OP.reference(*ours, eps=1e-5)
        right = torch.nn.functional.layer_norm(theirs[0], (hidden,), *theirs[1:], 1e-5)
        assert mine.dtype == right.dtype
        # The CPU's half-precision kernel sums in another order than its fp32 kernel, which now and then moves a tie.
        assert (mine != right).double().mean() <= (0 if dtype in (torch.float32, torch.float64) else 5e-3), style
        torch.testing.assert_close(mine, right, rtol=torch.finfo(dtype).eps, atol=1e-6)
        if dtype in (torch.float32, torch.float64):
            mine.backward(dy)
            right.backward(dy)
            assert all(a is None or torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_formula_has_torchs_bits_where_statistics_are_exact(dtype):
    half = (torch.randint(-16, 17, (9, 64)) / 4).to(dtype)
    x, given = torch.cat([half, -half], -1), vectors(128, dtype)  # the mean is 0, and quarters have exact squares
    assert torch.equal(OP.reference(x, *given), torch.nn.functional.layer_norm(x, (128,), *given))


def test_the_value_by_hand():
    x = torch.tensor([[1.0, 3.0, 8.0]], dtype=torch.float64)  # mean 4, distances -3 -1 4, variance 26/3
    weight, bias = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([0.0, 1.0, -1.0]).double()
    y, mean, rstd = SCHEME.reference(x, weight, bias, eps=1 / 3)
    assert (mean.item(), rstd.item()) == (4.0, pytest.approx(1 / 3))
    assert torch.allclose(y, torch.tensor([[-1.0, 1 - 2 / 3, 2 / 3 - 1]], dtype=torch.float64))


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([True, False], repeat=2)))
def test_gradcheck_in_float64(weight, bias):
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    given = [v for v in leaves(*vectors(5, torch.float64, weight, bias)) if v is not None]

    def call(x, *given):
        it = iter(given)
        return OP.reference(x, next(it) if weight else None, next(it) if bias else None, 1e-3)

    assert torch.autograd.gradcheck(call, (x, *given))


def test_zero_and_constant_rows_give_the_bias_and_finite_gradients():
    x = torch.stack([torch.zeros(8), torch.full((8,), 3.0)]).requires_grad_()
    weight, bias = vectors(8, torch.float32)
    y = OP.reference(x, weight, bias)
    y.square().sum().backward()
    assert torch.equal(y, bias.expand(2, 8))
    assert x.grad.isfinite().all()


# --- keys, examples, shapes -------------------------------------------------------------------------------------------

DTYPE = st.sampled_from([getattr(torch, d) for d in DTYPES])
PROBLEMS = st.builds(
    lambda rows, hidden, x, weight, bias, phase: OP.problem(
        OP.describe(
            (
                torch.empty(rows, hidden, dtype=x, device="meta"),
                *(None if v is None else torch.empty(hidden, dtype=v, device="meta") for v in (weight, bias)),
            ),
            {},
        ),
        phase,
        "default",
        (True, weight is not None, bias is not None),
    ),
    st.integers(0, 300),
    st.integers(1, 99),
    DTYPE,
    st.none() | DTYPE,
    st.none() | DTYPE,
    st.sampled_from([FORWARD, BACKWARD]),
)


@given(PROBLEMS, st.sampled_from(STYLES), st.sampled_from(["cpu", "meta"]))
def test_an_example_of_a_problem_is_that_problem(problem, style, device):
    inputs = OP.example(problem, device, 3, style)
    options = OP.options_of(problem)
    OP.validate(inputs, options)
    needs = OP.needs(problem) if problem.phase == BACKWARD else ()
    assert OP.problem(OP.describe(inputs, options), problem.phase, "default", needs) == problem
    assert OP.has(problem)


@given(PROBLEMS)
def test_magnitudes_have_the_shapes_of_what_they_measure(problem):
    inputs = tuple(None if t is None else t.double() for t in OP.example(problem, "cpu"))
    options = OP.options_of(problem)
    y, mean, rstd = SCHEME.reference(*inputs, **options)
    sizes = OP.magnitude(inputs, (torch.ones_like(y),), options)
    shapes = {"y": y.shape, "mean": mean.shape, "rstd": rstd.shape}
    shapes |= {f"grad_{i.name}": t.shape for i, t in zip(OP.inputs, inputs, strict=True) if t is not None}
    assert {name: size.shape for name, size in sizes.items()} == shapes
    assert all(size.dtype == torch.float64 and (size >= 0).all() for size in sizes.values())
    assert set(sizes) <= set(OP.reduced)


@given(PROBLEMS)
def test_allocate_is_what_the_reference_gives(problem):
    for shape in ((), (2,), (2, 3)):
        x, *rest = OP.example(problem, "cpu")
        x = x.expand(*shape, *x.shape).contiguous()
        options = OP.options_of(problem)
        empty, full = (f(x, *rest, **options) for f in (SCHEME.allocate, SCHEME.reference))
        assert [(t.shape, t.dtype, t.stride()) for t in empty] == [(t.shape, t.dtype, t.stride()) for t in full]


def test_token_counts_are_never_exact():
    assert [name for name, kind in OP.dims.items() if kind is DimKind.EXACT] == ["hidden"]
    OP.check()


def test_calls_are_those_of_architectures_with_layer_norms():
    call = next(iter(OP.calls(Architecture("a", "gpt2", 768, norm="layer_norm"), 32, "bfloat16")))
    assert call.dims == Fields(rows=32, hidden=768)
    assert dict(call.dtypes) == {"x": "bfloat16", "weight": "bfloat16", "bias": "bfloat16"}
    assert list(OP.calls(Architecture("b", "llama", 768, norm="rms_norm"), 32, "bfloat16")) == []


@pytest.mark.parametrize(
    ("inputs", "error", "way_out"),
    [
        ((torch.ones(()), None, None), InvalidInputError, "hidden >= 1"),
        ((torch.ones(3, 0), None, None), InvalidInputError, "hidden >= 1"),
        ((torch.ones(3, 4), torch.ones(5), None), InvalidInputError, "pass the weight"),
        ((torch.ones(3, 4), torch.ones(3, 4), None), InvalidInputError, "flatten"),
        ((torch.ones(3, 4), None, torch.ones(1)), InvalidInputError, "pass the bias"),
        ((torch.ones(3, 4).int(), None, None), UnsupportedDtypeError, "cast x"),
        ((torch.ones(3, 4).to(torch.float8_e4m3fn), None, None), UnsupportedDtypeError, "cast x"),
        ((torch.ones(3, 4), torch.ones(4).long(), None), UnsupportedDtypeError, "cast weight"),
        ((torch.ones(3, 4), torch.ones(4), torch.ones(4).long()), UnsupportedDtypeError, "cast bias"),
    ],
)
def test_inputs_that_contradict_the_contract(inputs, error, way_out):
    with pytest.raises(error, match="layer_norm") as raised:
        OP.validate(inputs, {"eps": 1e-5})
    assert way_out in str(raised.value)


@pytest.mark.parametrize("options", [{"eps": -1e-6}, {"eps": "1"}, {"eps": float("nan")}, {"normalized_shape": 2}])
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        OP.bind((torch.ones(2, 2),), options)


# --- PyTorch implementations and both faces ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "functional"])
def test_only_what_is_needed_is_computed(name):
    forward, backward = getattr(portable, f"forward_{name}"), getattr(portable, f"backward_{name}")
    x, (weight, bias) = fill((8, 16), torch.bfloat16, "cpu", 0), vectors(16, torch.bfloat16)
    _, *saved = forward(x, weight, bias, device=CPU, eps=1e-5)
    every = backward(x, x, weight, bias, *saved, device=CPU, needs=(True,) * 3, eps=1e-5)
    for needs in itertools.product([True, False], repeat=3):
        found = backward(x, x, weight, bias, *saved, device=CPU, needs=needs, eps=1e-5)
        for gradient, need, whole in zip(found, needs, every, strict=True):
            assert (gradient is None) != need
            assert not need or torch.equal(gradient, whole)


@pytest.mark.parametrize("name", ["eager", "functional"])
def test_a_mean_far_from_zero_costs_no_digits(name):
    # Multiples of 1/8 around 8192 are exact in fp32, the mean of their squares is not: E[x^2] - E[x]^2 would be noise.
    x = 8192 + torch.randint(-8, 9, (4, 512)) / 8
    y, _, rstd = getattr(portable, f"forward_{name}")(x, None, None, device=CPU, eps=0.0)
    exact = SCHEME.reference(x.double(), None, None, eps=0.0)
    torch.testing.assert_close(rstd.double(), exact[2], rtol=1e-3, atol=0)
    torch.testing.assert_close(y.double(), exact[0], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("implementation", [None, "eager", "functional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_handle_against_float64(dtype, implementation):
    norm = registry.get("layer_norm", implementation=implementation) if implementation else registry.get("layer_norm")
    x, dy = fill((3, 7, 64), dtype, "cpu", 0, "shifted"), fill((3, 7, 64), dtype, "cpu", 5)
    given = leaves(x, *vectors(64, dtype))
    before = [t.detach().clone() for t in given]
    y = norm(*given, 1e-4)
    found = torch.autograd.grad(y, given, dy, retain_graph=True)
    again = torch.autograd.grad(y, given, dy)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = OP.reference(*wide, 1e-4)
    right = torch.autograd.grad(exact, wide, dy.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip((y, *found), (exact, *right), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= tolerance * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(t, copy) for t, copy in zip(given, before, strict=True))


@pytest.mark.parametrize(
    ("x", "weight", "bias"), [("bfloat16", "float32", "float32"), ("float32", "bfloat16", "float16")]
)
def test_mixed_dtypes_keep_those_of_their_tensors(x, weight, bias):
    given = leaves(fill((5, 32), getattr(torch, x), "cpu", 0), vectors(32, getattr(torch, weight))[0],
                   vectors(32, getattr(torch, bias))[1])  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        y = registry.get("layer_norm")(*given)
    assert y.dtype == given[0].dtype
    assert [g.dtype for g in torch.autograd.grad(y.sum(), given)] == [t.dtype for t in given]
    exact = OP.reference(*(t.detach().double() for t in given))
    assert torch.equal(y, exact.to(y.dtype)) or torch.allclose(
        y.double(), exact, rtol=1e-2 if x == "bfloat16" else 1e-5
    )


def test_eps_weight_and_bias_change_the_result():
    norm, x, (weight, bias) = registry.get("layer_norm"), fill((4, 16), torch.float32, "cpu", 0), vectors(16, None)
    results = [norm(x), norm(x, eps=0.5), norm(x, weight), norm(x, None, bias), norm(x, weight, bias)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (False, True), (False, False)])
def test_opcheck(weight, bias):
    registry.get("layer_norm")
    given = leaves(fill((3, 4, 8), torch.float32, "cpu", 0), *vectors(8, torch.float32, weight, bias))
    torch.library.opcheck(torch.ops.liger_registry.layer_norm_forward.default, (*given, 1e-5, ""))


@pytest.mark.ci
def test_compiled_in_one_graph():
    norm, given = registry.get("layer_norm"), leaves(fill((6, 32), torch.float32, "cpu", 0), *vectors(32, None))
    compiled = torch.compile(lambda *given: norm(given[0] * 2, *given[1:]).relu(), fullgraph=True)
    found = torch.autograd.grad(compiled(*given).sum(), given)
    right = torch.autograd.grad(norm(given[0] * 2, *given[1:]).relu().sum(), given)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
