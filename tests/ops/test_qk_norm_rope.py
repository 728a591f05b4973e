"""The contract of qk_norm_rope and its PyTorch implementations: the models' own lines bit for bit, and float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from liger_registry import Device, registry
from liger_registry.architecture import Architecture
from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES
from liger_registry.op import Description, DimKind
from liger_registry.ops.qk_norm_rope import OP
from liger_registry.ops.rms_norm import CASTINGS
from liger_registry.portable import qk_norm_rope as portable
from liger_registry.problem import BACKWARD, FORWARD

SCHEME = OP.schemes[0]
OPTIONS = {o.name: o.default for o in OP.options}
CPU = Device.parse("cpu")


def made(dtype=torch.bfloat16, weight=None, width=16, rotary=16, batch=2, tokens=7):
    """``q, k, q_weight, k_weight, cos, sin``, heads (batch, tokens, heads, width) in memory."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape, of=dtype):
        return torch.randn(shape, generator=generator).to(of)

    q, k = (normal(batch, tokens, n, width).transpose(1, 2) for n in (4, 2))
    weights = (normal(width, of=weight or dtype) * 0.3 + 1 for _ in range(2))
    angles = normal(batch, tokens, rotary // 2, of=torch.float32).repeat(1, 1, 2)
    return q, k, *weights, angles.cos().to(dtype), angles.sin().to(dtype)


def leaves(*tensors):
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


# --- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Qwen3RMSNorm, {"casting": "llama"}), (Gemma3RMSNorm, {"casting": "gemma", "offset": 1.0})],
)
def test_values_and_gradients_are_the_models_bit_for_bit(kind, options, dtype):
    q, k, q_weight, k_weight, cos, sin = made(dtype)
    a, b = leaves(q, k), leaves(q, k, q_weight, k_weight)
    norms = [kind(16, eps=1e-5).to(dtype) for _ in range(2)]
    for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
        norm.weight.data.copy_(weight)
    # Gemma 3 normalises the transposed view, Qwen 3 what it is a view of; both give the same numbers.
    normed = [norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in zip(norms, a, strict=True)]
    right = apply_rotary_pos_emb(*normed, cos, sin)
    mine = OP.reference(*b, cos, sin, 1e-5, **options)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(mine, right, strict=True))
    grads = [torch.randn(y.shape).to(dtype) for y in right]
    torch.autograd.backward(right, grads)
    torch.autograd.backward(mine, grads)
    for x, y in zip((*a, *(norm.weight for norm in norms)), b, strict=True):
        assert torch.equal(x.grad, y.grad)
    launched = portable.forward_eager(
        *(t.detach() for t in b), cos, sin, device=CPU, **{**OPTIONS, "eps": 1e-5, **options}
    )
    assert all(torch.equal(x, y) for x, y in zip(launched, mine, strict=False))


def test_the_value_by_hand():
    x = torch.tensor([3.0, 4.0, 0.0]).double().view(1, 1, 1, 3)  # the mean square is 25 / 3
    quarter = torch.zeros(1, 2).double(), torch.ones(1, 2).double()
    q_out, k_out = OP.reference(x, x, torch.ones(3).double() * 2, torch.ones(3).double(), *quarter, 0.0, 1.0, "none")
    root = (25 / 3) ** -0.5
    torch.testing.assert_close(q_out.flatten(), torch.tensor([-12 * root, 9 * root, 0]).double())
    torch.testing.assert_close(k_out.flatten(), torch.tensor([-8 * root, 6 * root, 0]).double())


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("interleaved", [True, False])
def test_gradcheck_in_float64(casting, interleaved):
    *tensors, cos, sin = made(torch.float64, width=5, rotary=4, batch=1, tokens=2)
    call = lambda *x: OP.reference(*x, cos, sin, 1e-3, 0.5, casting, interleaved)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves(*tensors))


DTYPE = st.sampled_from(["float32", "float16", "bfloat16", "float64"])


def _problem(tokens, heads_q, heads_k, width, pairs, dtype, weight, tables, casting, interleaved, phase):
    dims = {"tokens": tokens, "heads_q": heads_q, "heads_k": heads_k, "head_dim": width}
    dims["rotary_dim"] = 2 * min(pairs, width // 2)
    dtypes = {"q": dtype, "k": dtype, "q_weight": weight, "k_weight": weight, "cos": tables, "sin": tables}
    described = Description(Fields(dims), Fields(dtypes), Fields(casting=casting, interleaved=interleaved))
    return OP.problem(described, phase, "default", (True,) * 4)


PROBLEMS = st.builds(
    _problem,
    st.integers(0, 300),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(2, 40),
    st.integers(1, 20),
    DTYPE,
    DTYPE,
    DTYPE,
    st.sampled_from(CASTINGS),
    st.booleans(),
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
def test_magnitudes_and_allocation_have_the_shapes_of_the_results(problem):
    inputs = OP.example(problem, "cpu")
    options = OP.options_of(problem)
    for layout in (lambda x: x, torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT):
        q, k, *rest = inputs
        given = (layout(q), layout(k), *rest)
        empty, full = (f(*given, **options) for f in (SCHEME.allocate, SCHEME.reference))
        assert [(t.shape, t.dtype, t.stride()) for t in empty] == [(t.shape, t.dtype, t.stride()) for t in full]
    wide = tuple(x.double() for x in inputs)
    sizes = OP.magnitude(wide, tuple(t.double() for t in full[:2]), options)
    shapes = {n: t.shape for n, t in zip((*OP.outputs, *SCHEME.saved), full, strict=True)}
    shapes |= {f"grad_{i.name}": t.shape for i, t in zip(OP.inputs, inputs, strict=True) if i.differentiable}
    assert {name: size.shape for name, size in sizes.items()} == shapes
    assert all(size.dtype == torch.float64 and (size >= 0).all() for size in sizes.values())
    assert set(sizes) == set(OP.reduced)


def test_token_counts_are_never_exact():
    assert [n for n, kind in OP.dims.items() if kind is DimKind.BUCKET] == ["tokens"]
    OP.check()


def test_calls_are_those_of_architectures_that_normalise_heads():
    call = next(iter(OP.calls(Architecture.preset("qwen3-8b"), 32, "bfloat16")))
    assert call.dims == Fields(tokens=32, heads_q=32, heads_k=8, head_dim=128, rotary_dim=128)
    assert call.flags == Fields(casting="llama", interleaved=False)
    assert next(iter(OP.calls(Architecture.preset("gemma-3-1b"), 32, "bfloat16"))).flags.casting == "gemma"
    assert list(OP.calls(Architecture.preset("llama-3-8b"), 32, "bfloat16")) == []


Q, W, T = torch.ones(2, 3, 5, 8), torch.ones(8), torch.ones(5, 8)


@pytest.mark.parametrize(
    ("inputs", "error", "way_out"),
    [
        ((Q[0], Q, W, W, T, T), InvalidInputError, "transpose(1, 2)"),
        ((Q, Q[:1], W, W, T, T), InvalidInputError, "once for each"),
        ((Q, Q.half(), W, W, T, T), UnsupportedDtypeError, "k.to(q.dtype)"),
        ((Q, Q, W[:4], W, T, T), InvalidInputError, "over a head"),
        ((Q, Q, W, W[:1], T, T), InvalidInputError, "over a head"),
        ((Q, Q, W.int(), W, T, T), UnsupportedDtypeError, "cast q_weight"),
        ((Q, Q, W, W.half(), T, T), UnsupportedDtypeError, "k_weight.to"),
        ((Q, Q, W, W, T[:4], T[:4]), InvalidInputError, "position_ids"),
        ((Q, Q, W, W, T, T.half()), UnsupportedDtypeError, "sin.to(cos.dtype)"),
    ],
)
def test_inputs_that_contradict_the_contract(inputs, error, way_out):
    with pytest.raises(error, match="qk_norm_rope") as raised:
        OP.validate(inputs, OPTIONS)
    assert way_out in str(raised.value)


@pytest.mark.parametrize("options", [{"eps": -1e-6}, {"casting": "olmo"}, {"half": True}])
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        OP.bind((Q, Q, W, W, T, T), options)


# --- PyTorch implementations and both faces ---------------------------------------------------------------------------


def test_only_what_is_needed_is_computed():
    tensors = made(torch.float32, rotary=8)
    options = {"device": CPU, **OPTIONS}
    *outputs, q_rstd, k_rstd = portable.forward_eager(*tensors, **options)
    grads = [torch.randn_like(y) for y in outputs]
    every = portable.backward_eager(*grads, *tensors, q_rstd, k_rstd, needs=(True,) * 4, **options)
    for needs in itertools.product([True, False], repeat=4):
        found = portable.backward_eager(*grads, *tensors, q_rstd, k_rstd, needs=needs, **options)
        for gradient, need, whole in zip(found, needs, every, strict=True):
            assert (gradient is None) != need
            assert not need or torch.equal(gradient, whole)


@pytest.mark.parametrize("implementation", [None, "eager", "functional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_handle_against_float64(dtype, implementation):
    pins = {"implementation": {"forward": implementation}} if implementation else {}
    op = registry.get("qk_norm_rope", **pins)
    *tensors, cos, sin = made(dtype, rotary=8)
    given = leaves(*tensors)
    before = [t.detach().clone() for t in (*given, cos, sin)]
    outputs = op(*given, cos, sin, offset=0.5)
    grads = [torch.randn_like(y) for y in outputs]
    found = torch.autograd.grad(outputs, given, grads, retain_graph=True)
    again = torch.autograd.grad(outputs, given, grads)
    wide = leaves(*(t.double() for t in tensors))
    exact = OP.reference(*wide, cos.double(), sin.double(), offset=0.5)
    right = torch.autograd.grad(exact, wide, [g.double() for g in grads])
    for a, b in zip((*outputs, *found), (*exact, *right), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(t, copy) for t, copy in zip((*given, cos, sin), before, strict=True))


def test_every_option_changes_the_result():
    op = registry.get("qk_norm_rope")
    tensors = made()
    options = [{}, {"eps": 0.5}, {"offset": 1.0}, {"casting": "gemma"}, {"interleaved": True}]
    results = [op(*tensors, **o)[0] for o in options]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


@pytest.mark.ci
def test_opcheck():
    registry.get("qk_norm_rope")
    *tensors, cos, sin = made(torch.float32, rotary=8)
    operator = torch.ops.liger_registry.qk_norm_rope_forward.default
    torch.library.opcheck(operator, (*leaves(*tensors), cos, sin, 1e-6, 0.0, "llama", False, ""))


@pytest.mark.ci
def test_compiled_in_one_graph():
    op = registry.get("qk_norm_rope")
    *tensors, cos, sin = made(torch.float32, rotary=8)
    given = leaves(*tensors)

    def call(q, k, q_weight, k_weight):
        q_out, k_out = op(q * 2, k * 3, q_weight, k_weight, cos, sin)
        return q_out.relu().sum() + k_out.sin().sum()

    found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*given), given)
    right = torch.autograd.grad(call(*given), given)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
