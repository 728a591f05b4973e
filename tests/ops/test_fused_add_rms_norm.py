"""The contract of fused_add_rms_norm and its PyTorch implementations: the decoder layers' own lines, and float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from liger_registry import Device, registry
from liger_registry.architecture import Architecture
from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.op import DimKind
from liger_registry.ops.fused_add_rms_norm import OP
from liger_registry.ops.rms_norm import CASTINGS, DTYPES
from liger_registry.portable import fused_add_rms_norm as portable
from liger_registry.problem import BACKWARD, FORWARD

FAMILIES = {
    "llama": (LlamaRMSNorm, {"casting": "llama"}),
    "gemma": (GemmaRMSNorm, {"casting": "gemma", "offset": 1.0}),
    "olmo2": (Olmo2RMSNorm, {"casting": "none"}),
}
OPTIONS = {o.name: o.default for o in OP.options}
SCHEME = OP.schemes[0]
CPU = Device.parse("cpu")
PORTABLE = {"eager": {}, "row_chunks": {"slab_rows": 4}}


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def made(shape=(3, 7, 64), dtype=torch.bfloat16):
    """``x, residual, weight, dy, dnew_residual``."""
    x, residual, dy, dnew = (fill(shape, dtype, "cpu", n) for n in range(4))
    return x, residual, fill(shape[-1:], dtype, "cpu", 4, scale=0.25) + 1, dy, dnew


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_is_that_of_a_decoder_layer(family, dtype):
    kind, options = FAMILIES[family]
    for seed, (style, hidden) in enumerate(itertools.product(STYLES, (1, 3, 64, 1536))):
        norm = kind(hidden, eps=1e-5).to(dtype)
        with torch.no_grad():
            norm.weight.add_(fill((hidden,), dtype, "cpu", seed, scale=0.3))
        shape = (2, 5, hidden)
        x, residual = (fill(shape, dtype, "cpu", seed + n, style) for n in (0, 1))
        dy, dnew = (fill(shape, dtype, "cpu", seed + n) for n in (2, 3))
        ours, theirs = leaves(x, residual, norm.weight), leaves(x, residual)
        mine = OP.reference(*ours, 1e-5, **options)
        hidden_states = theirs[1] + theirs[0]
        right = norm(hidden_states), hidden_states
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, right, strict=True)), (style, hidden)
        torch.autograd.backward(mine, (dy, dnew))
        torch.autograd.backward(right, (dy, dnew))
        assert torch.equal(ours[0].grad, theirs[0].grad)
        assert torch.equal(ours[1].grad, theirs[1].grad)
        assert torch.equal(ours[2].grad, norm.weight.grad)


def test_the_value_by_hand():
    x, residual = torch.tensor([[1.0, 5.0]]).double(), torch.tensor([[2.0, -1.0]]).double()  # the sum is (3, 4)
    y, new_residual = OP.reference(x, residual, torch.tensor([2.0, 0.5]).double(), 0.0, 1.0, "none")
    assert torch.equal(new_residual, torch.tensor([[3.0, 4.0]]).double())
    assert torch.allclose(y, torch.tensor([[9.0, 6.0]]).double() * 12.5**-0.5)


def test_the_sum_is_rounded_before_it_is_normalised():
    # 256 + 1 is 256 in bf16: normed before rounding, the row would not be of one value.
    x, residual = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.full((1, 2), 256.0).bfloat16()
    y, new_residual = OP.reference(x, residual)
    assert torch.equal(new_residual, residual)
    assert y[0, 0] == y[0, 1] == 1


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("weight", [True, False])
def test_gradcheck_in_float64(casting, offset, weight):
    x, residual = (torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.randn(5, dtype=torch.float64, requires_grad=True) if weight else None
    assert torch.autograd.gradcheck(lambda *t: OP.reference(*t, 1e-3, offset, casting), (x, residual, w))


@pytest.mark.parametrize("weight", [True, False])
def test_the_schemes_backward_is_the_references(weight):
    x, residual, w, dy, dnew = made(dtype=torch.float64)
    given = leaves(x, residual, w if weight else None)
    options = {**OPTIONS, "offset": 0.5, "casting": "gemma"}
    y, new_residual, rstd = SCHEME.reference(*given, **options)
    wanted = [t for t in given if t is not None]
    right = torch.autograd.grad((y, new_residual), wanted, (dy, dnew))
    held = (given[2], new_residual, rstd)
    for needs in itertools.product([True, False], repeat=3):
        found = SCHEME.backward(dy, dnew, *(None if t is None else t.detach() for t in held), needs=needs, **options)
        for gradient, need, whole in itertools.zip_longest(found, needs, right):
            assert (gradient is None) is (not need or whole is None)
            assert gradient is None or torch.allclose(gradient, whole)


# --- keys, examples, shapes -------------------------------------------------------------------------------------------

DTYPE = st.sampled_from([getattr(torch, d) for d in DTYPES])
PROBLEMS = st.builds(
    lambda rows, hidden, x, weight, casting, phase: OP.problem(
        OP.describe(
            (
                *(torch.empty(rows, hidden, dtype=x, device="meta") for _ in range(2)),
                None if weight is None else torch.empty(hidden, dtype=weight, device="meta"),
            ),
            {"casting": casting},
        ),
        phase,
        "default",
        (True, True, weight is not None),
    ),
    st.integers(0, 300),
    st.integers(1, 99),
    DTYPE,
    st.none() | DTYPE,
    st.sampled_from(CASTINGS),
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
    y, new_residual, rstd = SCHEME.reference(*inputs, **options)
    sizes = OP.magnitude(inputs, (torch.ones_like(y), torch.ones_like(y)), options)
    shapes = {"y": y.shape, "new_residual": new_residual.shape, "rstd": rstd.shape}
    shapes |= {f"grad_{i.name}": t.shape for i, t in zip(OP.inputs, inputs, strict=True) if t is not None}
    assert {name: size.shape for name, size in sizes.items()} == shapes
    assert all(size.dtype == torch.float64 and (size >= 0).all() for size in sizes.values())
    assert set(sizes) <= set(OP.reduced)


@given(PROBLEMS)
def test_allocate_is_what_the_reference_gives(problem):
    for shape in ((), (2,), (2, 3)):
        x, residual, weight = OP.example(problem, "cpu")
        x, residual = (t.expand(*shape, *t.shape).contiguous() for t in (x, residual))
        options = OP.options_of(problem)
        empty, full = (f(x, residual, weight, **options) for f in (SCHEME.allocate, SCHEME.reference))
        assert [(t.shape, t.dtype, t.stride()) for t in empty] == [(t.shape, t.dtype, t.stride()) for t in full]


def test_token_counts_are_never_exact():
    assert [name for name, kind in OP.dims.items() if kind is DimKind.EXACT] == ["hidden"]
    OP.check()


def test_calls_are_those_of_architectures_with_rms_norms():
    call = next(iter(OP.calls(Architecture("a", "gemma", 256, norm="rms_norm", norm_casting="gemma"), 32, "bfloat16")))
    assert (call.dims, call.flags) == (Fields(rows=32, hidden=256), Fields(casting="gemma"))
    assert set(call.dtypes.values()) == {"bfloat16"}
    assert list(OP.calls(Architecture("b", "gpt2", 768, norm="layer_norm"), 32, "bfloat16")) == []


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("inputs", "error", "way_out"),
    [
        ((torch.ones(()), torch.ones(()), None), InvalidInputError, "hidden >= 1"),
        ((torch.ones(3, 0), torch.ones(3, 0), None), InvalidInputError, "hidden >= 1"),
        ((ONES, torch.ones(4), None), InvalidInputError, "expand_as"),
        ((ONES, torch.ones(1, 4), None), InvalidInputError, "expand_as"),
        ((ONES, ONES, torch.ones(1)), InvalidInputError, "pass the weight"),
        ((ONES.bfloat16(), ONES, None), UnsupportedDtypeError, "x.to(residual.dtype)"),
        ((ONES, ONES.half(), None), UnsupportedDtypeError, "x.to(residual.dtype)"),
        ((ONES.int(), ONES.int(), None), UnsupportedDtypeError, "cast x"),
        ((ONES, ONES.int(), None), UnsupportedDtypeError, "cast residual"),
        ((ONES, ONES, torch.ones(4).long()), UnsupportedDtypeError, "cast weight"),
    ],
)
def test_inputs_that_contradict_the_contract(inputs, error, way_out):
    with pytest.raises(error, match="fused_add_rms_norm") as raised:
        OP.validate(inputs, OPTIONS)
    assert way_out in str(raised.value)


@pytest.mark.parametrize("options", [{"eps": -1e-6}, {"casting": "olmo"}, {"offset": float("nan")}, {"in_place": True}])
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        OP.bind((ONES, ONES), options)


# --- PyTorch implementations and both faces ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PORTABLE)
def test_only_what_is_needed_is_computed(name):
    forward, backward = getattr(portable, f"forward_{name}"), getattr(portable, f"backward_{name}")
    x, residual, weight, dy, dnew = made((8, 16))
    options = {"device": CPU, **OPTIONS, **PORTABLE[name]}
    _, new_residual, rstd = forward(x, residual, weight, **options)
    every = backward(dy, dnew, weight, new_residual, rstd, needs=(True,) * 3, **options)
    assert every[0] is every[1]
    for needs in itertools.product([True, False], repeat=3):
        found = backward(dy, dnew, weight, new_residual, rstd, needs=needs, **options)
        for gradient, need, whole in zip(found, needs, every, strict=True):
            assert (gradient is None) != need
            assert not need or torch.equal(gradient, whole)


@pytest.mark.parametrize("implementation", [None, "eager", "functional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_handle_against_float64(dtype, implementation):
    pins = {"implementation": {"forward": implementation}} if implementation else {}
    norm = registry.get("fused_add_rms_norm", **pins)
    *tensors, dy, dnew = made(dtype=dtype)
    given = leaves(*tensors)
    before = [t.detach().clone() for t in (*given, dy, dnew)]
    outputs = norm(*given, offset=0.5)
    found = torch.autograd.grad(outputs, given, (dy, dnew), retain_graph=True)
    again = torch.autograd.grad(outputs, given, (dy, dnew))
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = OP.reference(*wide, offset=0.5)
    right = torch.autograd.grad(exact, wide, (dy.double(), dnew.double()))
    for a, b in zip((*outputs, *found), (*exact, *right), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(t, copy) for t, copy in zip((*given, dy, dnew), before, strict=True))


@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_an_output_that_nobody_uses(used):
    norm = registry.get("fused_add_rms_norm")
    *tensors, dy, dnew = made(dtype=torch.float32)
    given, others = leaves(*tensors), leaves(*tensors)
    for handle, inputs in ((norm, given), (OP.reference, others)):
        outputs = handle(*inputs)
        pairs = [pair for pair, use in zip(zip(outputs, (dy, dnew), strict=True), used, strict=True) if use]
        torch.autograd.backward(*zip(*pairs, strict=True))
    for a, b in zip(given, others, strict=True):
        expected = torch.zeros_like(a) if b.grad is None else b.grad
        torch.testing.assert_close(a.grad, expected)


def test_two_leaves_do_not_share_their_gradients_memory():
    norm = registry.get("fused_add_rms_norm")
    *tensors, dy, dnew = made(dtype=torch.float32)
    x, residual, weight = leaves(*tensors)
    for count in (1, 2):  # the first is kept as it comes, the second is added in place
        torch.autograd.backward(norm(x, residual, weight), (dy, dnew))
        assert x.grad.data_ptr() != residual.grad.data_ptr()
        if count == 1:
            once = residual.grad.clone()
            x.grad.zero_()
            assert torch.equal(residual.grad, once)
    torch.testing.assert_close(x.grad, once)
    torch.testing.assert_close(residual.grad, 2 * once)


def test_gradients_through_layers_that_add_to_them():
    # The residual stream: each layer's gradient has more than one source, which the engine adds up in place where it
    # may. Values that differ from the reference's would show a gradient that two layers wrote to.
    norm = registry.get("fused_add_rms_norm")
    *tensors, dy, _ = made(dtype=torch.float64)

    def stack(step, x, residual, weight):
        for _ in range(3):
            y, residual = step(x, residual, weight)
            x = y.tanh() + x * 0.5
        return x + residual

    given, others = leaves(*tensors), leaves(*tensors)
    stack(norm, *given).backward(dy)
    stack(OP.reference, *others).backward(dy)
    for a, b in zip(given, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_every_option_changes_the_result():
    norm = registry.get("fused_add_rms_norm")
    x, residual, weight, *_ = made()
    options = [{}, {"eps": 0.5}, {"offset": 1.0}, {"casting": "gemma"}]
    results = [norm(x, residual, weight, **o)[0] for o in options] + [norm(x, residual)[0]]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


@pytest.mark.parametrize("weight", [True, False])
def test_opcheck(weight):
    registry.get("fused_add_rms_norm")
    *tensors, _, _ = made((3, 4, 8), torch.float32)
    given = leaves(*tensors[:2], tensors[2] if weight else None)
    torch.library.opcheck(torch.ops.liger_registry.fused_add_rms_norm_forward.default, (*given, 1e-6, 0.0, "llama", ""))


@pytest.mark.ci
def test_compiled_in_one_graph():
    norm = registry.get("fused_add_rms_norm")
    *tensors, dy, dnew = made((6, 32), torch.float32)
    given = leaves(*tensors)

    def call(x, residual, weight):
        y, new_residual = norm(x * 2, residual * 3, weight)
        return y.relu(), new_residual + 1

    found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*given), given, (dy, dnew))
    right = torch.autograd.grad(call(*given), given, (dy, dnew))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
