"""The contract of rope and its PyTorch implementations: the models' own functions bit for bit, and float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as deepseek
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as ernie
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from liger_registry import Device, registry
from liger_registry.architecture import Architecture
from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES
from liger_registry.op import DimKind
from liger_registry.ops.rope import OP
from liger_registry.portable import rope as portable
from liger_registry.problem import BACKWARD, FORWARD

SCHEME = OP.schemes[0]
OPTIONS = {o.name: o.default for o in OP.options}
CPU = Device.parse("cpu")
EVERY = [
    {},
    {"interleaved": True},
    {"half": True},
    {"wide": True},
    {"interleaved": True, "half": True},
    {"interleaved": True, "half": True, "wide": True},
    {"interleaved": True, "half": True, "deinterleave": True},
]


def heads(count, dtype=torch.bfloat16, batch=2, tokens=7, width=16, seed=0):
    """Queries or keys as a model has them: (batch, tokens, heads, width) in memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, count, width, generator=generator).to(dtype).transpose(1, 2)


def tables(width=16, dtype=torch.bfloat16, tokens=7, start=0, neighbours=False):
    """cos and sin of a model's own angles, (1, tokens, width)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(start, start + tokens)[:, None] * frequencies
    angles = angles.repeat_interleave(2, -1) if neighbours else torch.cat((angles, angles), -1)
    return angles.cos()[None].to(dtype), angles.sin()[None].to(dtype)


def any_tables(shape, dtype=torch.bfloat16):
    """Tables in which no two columns agree."""
    angles = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def first_half(table):
    return table[..., : table.shape[-1] // 2]


# --- the contract -----------------------------------------------------------------------------------------------------

FAMILIES = {
    "llama": (llama, {}, lambda t: t),
    "neox": (neox, {}, lambda t: t[..., :8]),
    "glm": (glm, {"interleaved": True, "half": True}, first_half),
    "cohere": (cohere, {"interleaved": True, "wide": True}, lambda t: t),
    "ernie": (ernie, {"interleaved": True, "half": True, "wide": True}, first_half),
    "deepseek": (deepseek, {"interleaved": True, "half": True, "deinterleave": True}, first_half),
}


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32",) * 2]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_models_bit_for_bit(family, dtypes):
    theirs, options, ours = FAMILIES[family]
    heads_dtype, table_dtype = (getattr(torch, name) for name in dtypes)
    q, k = heads(4, heads_dtype), heads(2, heads_dtype, seed=1)
    cos, sin = tables(dtype=table_dtype, neighbours=family == "cohere")
    if family == "neox":
        cos, sin = cos[..., :8], sin[..., :8]
    a, b = ([x.detach().requires_grad_() for x in (q, k)] for _ in range(2))
    right = theirs(*a, cos, sin)
    mine = OP.reference(*b, ours(cos), ours(sin), **options)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(mine, right, strict=True))
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype) for y in right]
    torch.autograd.backward(right, grads)
    found = torch.autograd.grad(mine, b, grads)
    launched = portable.forward_halves(q, k, ours(cos), ours(sin), device=CPU, **{**OPTIONS, **options})
    assert all(torch.equal(x, y) for x, y in zip(launched, mine, strict=False))
    for x, y in zip(a, found, strict=True):
        if family == "ernie":  # rounds both terms of the gradient, where the derivative of the fp32 sum rounds once
            torch.testing.assert_close(y, x.grad, rtol=1e-2, atol=2e-2)
        else:
            assert torch.equal(y, x.grad)
    # What the launch functions round is what autograd rounds.
    narrow = q.new_empty(2, 0)
    for name in ("eager", "halves"):
        backward = getattr(portable, f"backward_{name}")
        again = backward(*grads, ours(cos), ours(sin), narrow, device=CPU, needs=(True, True), **{**OPTIONS, **options})
        assert all(torch.equal(x, y) for x, y in zip(again, found, strict=True))


def test_gptj_by_one_tensor_with_tables_of_one_column_a_pair():
    key = heads(3, torch.float32).transpose(1, 2)  # (batch, tokens, heads, width), as GPT-J turns it
    angles = torch.randn(2, 7, 4)
    right = torch.cat((gptj(key[..., :8], angles.sin(), angles.cos()), key[..., 8:]), -1)
    mine, none = OP.reference(key.transpose(1, 2), None, angles.cos(), angles.sin(), interleaved=True, half=True)
    assert torch.equal(mine.transpose(1, 2), right)
    assert none.shape == (2, 0, 7, 16)


def test_products_are_rounded_before_they_are_added():
    # 1.0078125^2 is 1.01568..., in bf16 1.015625; minus 1.015625 it is 0 only if the product was rounded.
    q = torch.tensor([1.0078125, 1.015625]).bfloat16().view(1, 1, 1, 2)
    cos, sin = torch.tensor([[1.0078125, 0.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    assert OP.reference(q, None, cos, sin)[0][..., 0] == 0
    assert OP.reference(q, None, cos, sin, wide=True)[0][..., 0] != 0


def test_the_value_by_hand():
    q = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).double().view(1, 1, 1, 5)
    quarter = torch.zeros(1, 4).double(), torch.ones(1, 4).double()  # a quarter turn: (a, b) becomes (-b, a)
    halves, _ = OP.reference(q, None, *quarter)
    assert halves.flatten().tolist() == [-3, -4, 1, 2, 5]
    neighbours, _ = OP.reference(q, None, *quarter, interleaved=True)
    assert neighbours.flatten().tolist() == [-2, 1, -4, 3, 5]
    one = quarter[0][:, :2], quarter[1][:, :2]
    assert OP.reference(q, None, *one, half=True)[0].flatten().tolist() == [-3, -4, 1, 2, 5]
    both, _ = OP.reference(q, None, *one, True, True, True)
    assert both.flatten().tolist() == [-2, -4, 1, 3, 5]


def test_any_positions_are_rows_of_the_tables():
    q = heads(2, torch.float32)
    cos, sin = tables(dtype=torch.float32, tokens=100)
    positions = torch.tensor([[3, 1, 4, 1, 5, 92, 65], [35, 8, 97, 93, 2, 38, 46]])
    out, _ = OP.reference(q, None, cos[0][positions], sin[0][positions])
    for b, t in itertools.product(range(2), range(7)):
        position = int(positions[b, t])
        alone, _ = OP.reference(q[b : b + 1, :, t : t + 1], None, cos[:, position, None][0], sin[:, position, None][0])
        assert torch.equal(out[b, :, t], alone[0, :, 0])
    # Turned by p and by r, the product of query and key depends on p - r alone.
    a, b = (OP.reference(q, q, *tables(dtype=torch.float32, start=n)) for n in (0, 50))
    torch.testing.assert_close(a[0] @ a[1].mT, b[0] @ b[1].mT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_ranks_and_batches_of_tables(options):
    q, k = heads(3, torch.float32), heads(1, torch.float32)
    cos, sin = any_tables((7, 6), torch.float32)
    right = OP.reference(q, k, cos, sin, **options)
    for shape in ((1, 7, 6), (2, 7, 6), (1, 1, 7, 6), (2, 1, 7, 6)):
        found = OP.reference(q, k, cos.expand(shape), sin.expand(shape), **options)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    each = any_tables((2, 7, 6), torch.float32)
    found = OP.reference(q, k, *each, **options)[0]
    for n in range(2):
        assert torch.equal(found[n], OP.reference(q, k, *(t[n] for t in each), **options)[0][n])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["eager", "halves"])
def test_the_tail_passes_bit_for_bit(name, dtype):
    q, k = heads(4, dtype), heads(2, dtype)
    q[0, 0, 0, 8:] = torch.tensor([math.inf, -0.0, math.nan, 1e-40, 0, 1, 2, 3])
    cos, sin = any_tables((7, 8), dtype)
    forward = getattr(portable, f"forward_{name}")
    q_out, k_out, _ = forward(q, k, cos, sin, device=CPU, **OPTIONS)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    for out, x in ((q_out, q), (k_out, k)):
        assert torch.equal(out[..., 8:].contiguous().view(whole), x[..., 8:].contiguous().view(whole))
        assert out.stride() == x.stride()


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_gradcheck_in_float64(options):
    q, k = (heads(n, torch.float64, 2, 3, 7).requires_grad_() for n in (2, 1))
    cos, sin = any_tables((2, 3, 3 if options.get("half") else 6), torch.float64)
    assert torch.autograd.gradcheck(lambda *x: OP.reference(*x, cos, sin, **options), (q, k))


@pytest.mark.parametrize("name", ["reference", "eager", "halves"])
@pytest.mark.parametrize("options", EVERY, ids=str)
def test_backward_needs_neither_queries_nor_keys(options, name):
    q, k = heads(3, torch.float64).requires_grad_(), heads(2, torch.float64).requires_grad_()
    cos, sin = any_tables((2, 7, 6 if options.get("half") else 12), torch.float64)
    outputs = OP.reference(q, k, cos, sin, **options)
    grads = [torch.randn(y.shape).double() for y in outputs]
    right = torch.autograd.grad(outputs, (q, k), grads)
    given = {**OPTIONS, **options} if name == "reference" else {**OPTIONS, **options, "device": CPU}
    backward = SCHEME.backward if name == "reference" else getattr(portable, f"backward_{name}")
    for needs in itertools.product([True, False], repeat=2):
        # (batch, tokens, heads, width) in memory, then (batch, heads, tokens, width).
        for gs in ([g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads], grads):
            found = backward(*gs, cos, sin, q.new_empty(2, 0), needs=needs, **given)
            for gradient, need, exact in zip(found, needs, right, strict=True):
                assert (gradient is None) != need
                if need:
                    torch.testing.assert_close(gradient, exact)


DTYPE = st.sampled_from(["float32", "float16", "bfloat16", "float64"])


def _problem(tokens, heads_q, heads_k, width, pairs, dtype, tables, options, phase):
    rotary = 2 * min(pairs, width // 2)
    k = heads_k > 0
    dtypes = {"q": dtype, "k": dtype if k else "none", "cos": tables, "sin": tables}
    dims = {"tokens": tokens, "heads_q": heads_q, "heads_k": heads_k, "head_dim": width, "rotary_dim": rotary}
    described = type(next(iter(OP.odd("float32"))))(Fields(dims), Fields(dtypes), Fields({**OPTIONS, **options}))
    return OP.problem(described, phase, "default", (True, k))


PROBLEMS = st.builds(
    _problem,
    st.integers(0, 300),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(2, 40),
    st.integers(1, 20),
    DTYPE,
    DTYPE,
    st.sampled_from(EVERY),
    st.sampled_from([FORWARD, BACKWARD]),
)


@given(PROBLEMS, st.sampled_from(STYLES), st.sampled_from(["cpu", "meta"]), st.integers(0, 20))
def test_an_example_of_a_problem_is_that_problem(problem, style, device, seed):
    inputs = OP.example(problem, device, seed, style)
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
        q, k, cos, sin = (None if x is None else layout(x) if x.dim() == 4 else x for x in inputs)
        empty, full = (f(q, k, cos, sin, **options) for f in (SCHEME.allocate, SCHEME.reference))
        assert [(t.shape, t.dtype, t.stride()) for t in empty] == [(t.shape, t.dtype, t.stride()) for t in full]
    wide = tuple(None if x is None else x.double() for x in inputs)
    sizes = OP.magnitude(wide, tuple(t.double() for t in full[:2]), options)
    names = ["q", "k"] if inputs[1] is not None else ["q"]
    assert sizes.keys() == {f"{n}_out" for n in names} | {f"grad_{n}" for n in names}
    for name, x, y in zip(names, inputs, SCHEME.reference(*wide, **options), strict=False):
        assert sizes[f"grad_{name}"].shape == x.shape
        # No element is larger than the terms that make it, which are at most the root of two times the pair.
        assert (y.abs() <= sizes[f"{name}_out"] * (1 + 1e-5) + 1e-12).all()


def test_token_counts_are_never_exact():
    assert [n for n, kind in OP.dims.items() if kind is DimKind.BUCKET] == ["tokens"]
    OP.check()


def test_calls_are_those_of_architectures_that_rotate():
    call = next(iter(OP.calls(Architecture.preset("llama-3-8b"), 32, "bfloat16")))
    assert call.dims == Fields(tokens=32, heads_q=32, heads_k=8, head_dim=128, rotary_dim=128)
    assert not any(call.flags.values())
    assert list(OP.calls(Architecture.preset("gpt2"), 32, "bfloat16")) == []
    glm_like = Architecture("g", "glm4", 64, heads=4, kv_heads=2, head_dim=16, rotary_dim=8, norm="rms_norm")
    flags = next(iter(OP.calls(glm_like, 32, "bfloat16"))).flags
    assert flags == Fields(interleaved=True, deinterleave=False, half=True, wide=False)


Q, T = torch.ones(2, 3, 5, 8), torch.ones(5, 8)


@pytest.mark.parametrize(
    ("inputs", "error", "way_out"),
    [
        ((Q[0], None, T, T), InvalidInputError, "transpose(1, 2)"),
        ((Q, Q[:, :, :4], T, T), InvalidInputError, "once for each"),
        ((Q, Q.half(), T, T), UnsupportedDtypeError, "k.to(q.dtype)"),
        ((Q.int(), None, T, T), UnsupportedDtypeError, "cast q"),
        ((Q, None, None, T), InvalidInputError, "pass a table"),
        ((Q, None, T, None), InvalidInputError, "pass a table"),
        ((Q, None, T.int(), T.int()), UnsupportedDtypeError, "cast cos"),
        ((Q, None, T[:4], T[:4]), InvalidInputError, "position_ids"),
        ((Q, None, T.expand(3, 5, 8), T.expand(3, 5, 8)), InvalidInputError, "position_ids"),
        ((Q, None, T.expand(2, 3, 5, 8), T.expand(2, 3, 5, 8)), InvalidInputError, "position_ids"),
        ((Q, None, T[:, :3], T[:, :3]), InvalidInputError, "half=True"),
        ((Q[..., :6], None, T, T), InvalidInputError, "half=True"),
        ((Q, None, T, T[:, :4]), InvalidInputError, "one shape"),
        ((Q, None, T, T.half()), UnsupportedDtypeError, "sin.to(cos.dtype)"),
    ],
)
def test_inputs_that_contradict_the_contract(inputs, error, way_out):
    with pytest.raises(error, match="rope") as raised:
        OP.validate(inputs, OPTIONS)
    assert way_out in str(raised.value)


@pytest.mark.parametrize("options", [{"deinterleave": True}, {"deinterleave": True, "interleaved": True}])
def test_options_that_contradict_each_other(options):
    with pytest.raises(UnsupportedOptionError, match="deinterleave"):
        registry.get("rope")(Q, Q, T, T, **options)
    with pytest.raises(UnsupportedOptionError):
        OP.bind((Q, Q, T, T), {"interleaved": 1})


# --- both faces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [True, False])
@pytest.mark.parametrize("options", EVERY, ids=str)
def test_the_handle_against_float64(options, k):
    rope = registry.get("rope")
    leaves = [heads(4, torch.float32).requires_grad_(), heads(2, torch.float32).requires_grad_()][: 2 if k else 1]
    given = leaves if k else [*leaves, None]
    cos, sin = any_tables((2, 7, 5 if options.get("half") else 10), torch.float32)
    before = [t.detach().clone() for t in (*leaves, cos, sin)]
    outputs = rope(*given, cos, sin, **options)
    grads = [torch.randn_like(y) for y in outputs[: len(leaves)]]
    found = torch.autograd.grad(outputs[: len(leaves)], leaves, grads, retain_graph=True)
    again = torch.autograd.grad(outputs[: len(leaves)], leaves, grads)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = OP.reference(*(wide if k else [*wide, None]), cos.double(), sin.double(), **options)
    right = torch.autograd.grad(exact[: len(leaves)], wide, [g.double() for g in grads])
    for a, b in zip((*outputs, *found), (*exact, *right), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*leaves, cos, sin), before, strict=True))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradients_of_one_of_the_two(needs):
    rope = registry.get("rope")
    q, k = (heads(n).requires_grad_(need) for n, need in zip((4, 2), needs, strict=True))
    cos, sin = tables(dtype=torch.float32)  # promotes: gradients come back in bf16 all the same
    outputs = rope(q, k, cos, sin)
    assert outputs[0].dtype == torch.float32
    (outputs[0].sum() + outputs[1].sum()).backward()  # expanded gradients
    for x, need in zip((q, k), needs, strict=True):
        assert (x.grad is not None) == need
        assert not need or x.grad.dtype == torch.bfloat16


def test_every_option_changes_the_result():
    rope = registry.get("rope")
    q, k = heads(4), heads(2)
    cos, sin = any_tables((7, 8))
    results = [rope(q, k, cos, sin, **options)[0] for options in EVERY]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


@pytest.mark.ci
@pytest.mark.parametrize("k", [True, False])
def test_opcheck(k):
    registry.get("rope")
    q, other = heads(2, torch.float32).requires_grad_(), heads(1, torch.float32).requires_grad_()
    cos, sin = any_tables((1, 7, 8), torch.float32)
    operator = torch.ops.liger_registry.rope_forward.default
    torch.library.opcheck(operator, (q, other if k else None, cos, sin, False, False, False, False, ""))


@pytest.mark.ci
@pytest.mark.parametrize("k", [True, False])
def test_compiled_in_one_graph(k):
    rope = registry.get("rope")
    leaves = [heads(4, torch.float32).requires_grad_(), heads(2, torch.float32).requires_grad_()][: 2 if k else 1]
    cos, sin = any_tables((1, 7, 8), torch.float32)

    def call(q, other=None):
        q_out, k_out = rope(q * 2, other, cos, sin)
        return q_out.relu().sum() + (k_out.sin().sum() if other is not None else 0)

    found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*leaves), leaves)
    right = torch.autograd.grad(call(*leaves), leaves)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
