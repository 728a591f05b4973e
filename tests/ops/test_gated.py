"""The contracts of swiglu and geglu: the models' formula bit for bit, keys, errors, and both faces of a call."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from liger_registry import registry
from liger_registry.accuracy import judge
from liger_registry.architecture import Architecture
from liger_registry.errors import DeviceMismatchError, InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.op import DimKind
from liger_registry.ops import geglu, swiglu
from liger_registry.ops._gated import DTYPES
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.tuning.cases import evaluate

OPS = {"swiglu": swiglu.OP, "geglu": geglu.OP}
SCALED = {"gate_multiplier": 0.884, "down_multiplier": -1.3}
CALLS = [("swiglu", {}), ("swiglu", SCALED), ("geglu", {}), ("geglu", {"approximate": "none"})]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
HALVES = [torch.bfloat16, torch.float16, torch.float32]


def options_of(op, given):
    return {o.name: given.get(o.name, o.default) for o in op.options}


def pair(*shape, dtype=torch.float32, up_dtype=None, seed=0, style="random", grad=False):
    gate, up = fill(shape, dtype, "cpu", seed, style), fill(shape, up_dtype or dtype, "cpu", seed + 1)
    return gate.requires_grad_(grad), up.requires_grad_(grad)


# --- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("kind", "config", "name", "options"),
    [
        (LlamaMLP, LlamaConfig, "swiglu", {}),
        (Gemma2MLP, Gemma2Config, "geglu", {}),
        (LlamaMLP, LlamaConfig, "geglu", {"approximate": "none"}),
        (Phi3MLP, Phi3Config, "swiglu", {}),
        (FalconH1MLP, FalconH1Config, "swiglu", {"gate_multiplier": 0.884}),
    ],
)
def test_the_formula_is_the_models(kind, config, name, options, dtype):
    sizes = dict(SIZES)
    if options.get("approximate"):
        sizes["hidden_act"] = "gelu"
    if "gate_multiplier" in options:
        sizes["mlp_multipliers"] = [0.884, 1.0]
    if kind is Phi3MLP:
        sizes["pad_token_id"] = 0
    mlp = kind(config(**sizes)).to(dtype).requires_grad_(False)
    for seed, style in enumerate(STYLES):
        # fp16 holds less than a hundredth of what squares of 32 x 32 x 4 come to.
        x = fill((2, 5, 16), dtype, "cpu", seed, style, 2.0**-6 if dtype == torch.float16 else 1.0).requires_grad_()
        y = mlp(x)
        dy = fill(tuple(y.shape), dtype, "cpu", seed + 9)
        (right,) = torch.autograd.grad(y, x, dy)
        inputs = (mlp.gate_up_proj(x),) if kind is Phi3MLP else (mlp.gate_proj(x), mlp.up_proj(x))
        mine = mlp.down_proj(OPS[name].reference(*inputs, **options))
        assert torch.equal(mine, y), style
        (gradient,) = torch.autograd.grad(mine, x, dy)
        assert torch.equal(gradient, right), style


def test_values_by_hand():
    gate, up = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64), torch.tensor([[5.0, 2.0]]).double()
    expected = torch.tensor([[0.0, math.log(3.0) * 0.75 * 2]], dtype=torch.float64)
    torch.testing.assert_close(swiglu.OP.reference(gate, up), expected)
    torch.testing.assert_close(swiglu.OP.reference(torch.cat((gate, up), -1)), expected)
    scaled = swiglu.OP.reference(gate / 2, up, 2.0, -3.0)
    torch.testing.assert_close(scaled, -3 * expected)
    # Phi(1) = .8413447460685429 of the normal distribution; tanh(.7978845608 * 1.044715) = .6823839...
    one, two = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    assert geglu.OP.reference(one, two, "none").item() == pytest.approx(2 * 0.8413447460685429)
    tanh = math.tanh(math.sqrt(2 / math.pi) * 1.044715)
    assert geglu.OP.reference(one, two).item() == pytest.approx(1 + tanh)


@pytest.mark.parametrize(("name", "options"), CALLS)
def test_gradcheck_in_float64(name, options):
    gate, up = pair(3, 2, 4, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda g, u: OPS[name].reference(g, u, **options), (gate, up))
    packed = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: OPS[name].reference(g, **options), (packed,))


@pytest.mark.parametrize("dtypes", [*itertools.permutations(HALVES, 2)], ids=str)
def test_mixed_dtypes_promote_as_pytorch_does(dtypes):
    gate, up = pair(4, 6, dtype=dtypes[0], up_dtype=dtypes[1])
    right = functional.silu(gate) * up
    for implementation in (None, "eager", "functional"):
        y = registry.get("swiglu", implementation=implementation)(gate, up)
        assert y.dtype == right.dtype
        assert torch.equal(y, right)


# --- keys, examples, shapes -------------------------------------------------------------------------------------------


def problem_of(name, rows, width, gate, up, variant, phase):
    op = OPS[name]
    options = options_of(op, variant)
    last = 2 * width if up is None else width
    inputs = (
        torch.empty(rows, last, dtype=gate, device="meta"),
        None if up is None else torch.empty(rows, width, dtype=up, device="meta"),
    )
    return op, op.problem(op.describe(inputs, options), phase, "default", (True, up is not None))


FLOATS = [getattr(torch, d) for d in DTYPES]
PROBLEMS = st.builds(
    lambda call, *rest: problem_of(call[0], *rest[:4], call[1], rest[4]),
    st.sampled_from(CALLS),
    st.integers(0, 300),
    st.integers(1, 99),
    st.sampled_from(FLOATS),
    st.sampled_from([None, *FLOATS]),
    st.sampled_from([FORWARD, BACKWARD]),
)


@given(PROBLEMS, st.sampled_from(STYLES), st.sampled_from(["cpu", "meta"]))
def test_an_example_of_a_problem_is_that_problem(case, style, device):
    op, problem = case
    inputs, options = op.example(problem, device, 3, style), op.options_of(problem)
    op.validate(inputs, options)
    needs = op.needs(problem) if problem.phase == BACKWARD else ()
    assert op.problem(op.describe(inputs, options), problem.phase, "default", needs) == problem
    assert op.has(problem)


@given(PROBLEMS)
def test_magnitudes_and_allocations_have_the_shapes_of_results(case):
    op, problem = case
    options, inputs = op.options_of(problem), op.example(problem, "cpu")
    scheme = op.schemes[0]
    (empty,), (full,) = scheme.allocate(*inputs, **options), scheme.reference(*inputs, **options)
    assert (empty.shape, empty.dtype, empty.stride()) == (full.shape, full.dtype, full.stride())
    sizes = op.magnitude(tuple(None if t is None else t.double() for t in inputs), (full.double(),), options)
    shapes = {"y": full.shape, "grad_gate": inputs[0].shape}
    if inputs[1] is not None:
        shapes["grad_up"] = full.shape
    assert {name: size.shape for name, size in sizes.items()} == shapes
    assert all(size.dtype == torch.float64 and (size >= 0).all() for size in sizes.values())


@pytest.mark.parametrize(("name", "options"), CALLS)
def test_magnitudes_are_no_smaller_than_what_they_measure(name, options):
    op = OPS[name]
    options = options_of(op, options)
    gate, up = (4 * t for t in pair(64, 64, dtype=torch.float64))
    dy = torch.randn_like(gate)
    truth = evaluate(op, (gate, up), options, (dy,))
    sizes = op.magnitude((gate, up), (dy,), options)
    for key, value in truth.items():
        assert (value.abs() <= sizes[key] * (1 + 1e-9) + 1e-12).all(), key


@pytest.mark.parametrize("name", OPS)
def test_the_key_tells_packed_from_two_tensors(name):
    op = OPS[name]
    gate, up = pair(6, 8)
    two, packed = (op.describe(t, options_of(op, {})) for t in ((gate, up), (torch.cat((gate, up), -1), None)))
    assert dict(two.dims) == dict(packed.dims) == {"rows": 6, "width": 8}
    assert two != packed
    assert [n for n, kind in op.dims.items() if kind is DimKind.EXACT] == ["width"]
    op.check()
    with pytest.raises(UnsupportedOptionError):
        op.bind((gate, up), {"out": 1})
    for dims in op.proxies(op.problem(two, FORWARD, "default")):
        assert 0 < dims["rows"] <= 261


def test_multipliers_are_known_to_the_key_by_class():
    gate, up = pair(2, 4)
    keys = {swiglu.OP.describe((gate, up), {"gate_multiplier": g, "down_multiplier": d}).flags
            for g, d in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (4.0, 5.0))}  # fmt: skip
    assert {tuple(k.items()) for k in keys} == {(("scaled", False),), (("scaled", True),)}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("gate", "up", "error", "way_out"),
    [
        (torch.ones(()), None, InvalidInputError, "width"),
        (torch.ones(3, 0), None, InvalidInputError, "width >= 1"),
        (torch.ones(3, 5), None, InvalidInputError, "2 \\* width"),
        (torch.ones(3, 4), torch.ones(3, 5), InvalidInputError, "expand"),
        (torch.ones(3, 4), torch.ones(4), InvalidInputError, "expand"),
        (torch.ones(3, 4).int(), torch.ones(3, 4), UnsupportedDtypeError, "cast gate"),
        (torch.ones(3, 4), torch.ones(3, 4).long(), UnsupportedDtypeError, "cast up"),
        (torch.ones(3, 4).to(torch.float8_e4m3fn), None, UnsupportedDtypeError, "cast gate"),
        (torch.ones(3, 4), torch.ones(3, 4, device="meta"), DeviceMismatchError, "one device"),
    ],
)
def test_inputs_that_contradict_the_contract(name, gate, up, error, way_out):
    with pytest.raises(error, match=f"(?s){name}.*{way_out}"):
        registry.get(name)(gate, up)


@pytest.mark.parametrize(
    ("name", "options"),
    [("swiglu", {"gate_multiplier": "2"}), ("swiglu", {"down_multiplier": float("nan")}),
     ("swiglu", {"approximate": "tanh"}), ("geglu", {"approximate": "sigmoid"}), ("geglu", {"gate_multiplier": 2.0})],
)  # fmt: skip
def test_options_that_are_refused(name, options):
    with pytest.raises(UnsupportedOptionError):
        registry.get(name)(*pair(2, 2), **options)


@pytest.mark.parametrize("implementation", ["eager", "functional"])
def test_every_option_changes_the_result(implementation):
    gate, up = pair(4, 4)
    for name, changes in (
        ("swiglu", [{"gate_multiplier": 0.5}, {"down_multiplier": 0.5}]),
        ("geglu", [{"approximate": "none"}]),
    ):
        handle = registry.get(name, implementation=implementation)
        for options in changes:
            assert not torch.equal(handle(gate, up), handle(gate, up, **options))
            assert torch.equal(handle(gate, up, **options), OPS[name].reference(gate, up, **options))


# --- what models call -------------------------------------------------------------------------------------------------


def calls(op, model, tokens=4096):
    architecture = model if isinstance(model, Architecture) else Architecture.preset(model)
    found = list(op.calls(architecture, tokens, "bfloat16"))
    return {(d.dims.rows, d.dims.width, d.dtypes.up, *dict(d.flags).values()) for d in found}


def made(kind, activation, **more):
    return Architecture("x", kind, 64, intermediate=96, activation=activation, norm="rms_norm", **more)


def test_calls_are_what_models_do():
    assert calls(swiglu.OP, "llama-3-8b") == {(4096, 14336, "bfloat16", False)}
    assert calls(swiglu.OP, "phi-3-mini") == {(4096, 8192, "none", False)}
    assert calls(swiglu.OP, "gemma-2-9b") == calls(geglu.OP, "llama-3-8b") == set()
    assert calls(geglu.OP, "gemma-2-9b") == {(4096, 14336, "bfloat16", "tanh")}
    assert calls(geglu.OP, made("zamba", "gelu")) == {(4096, 96, "bfloat16", "none")}
    assert calls(geglu.OP, "gpt2") == set()  # no gate
    assert calls(swiglu.OP, made("falcon_h1", "silu")) == {(4096, 96, "bfloat16", True)}
    assert calls(swiglu.OP, made("gpt_oss", "silu", experts=4, experts_per_token=2)) == set()  # clamped
    # Two of eight experts: all at once, and one that sees a quarter of the tokens.
    assert calls(swiglu.OP, "mixtral-8x7b") == {
        (8192, 14336, "none", False),
        (1024, 14336, "none", False),
        (1024, 14336, "bfloat16", False),
    }
    assert calls(swiglu.OP, made("mixtral", "silu", experts=64, experts_per_token=1), tokens=8) >= {(1, 96, "none", 0)}


# --- both faces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "options"), CALLS)
@pytest.mark.parametrize("implementation", ["eager", "functional", None])
def test_values_and_gradients_against_float64(name, options, packed, implementation):
    op = OPS[name]
    handle, filled = registry.get(name, implementation=implementation), options_of(op, options)
    for dtype, shape in itertools.product([*HALVES, torch.float64], [(37, 96), (2, 3, 5, 7), (9,)]):
        gate, up = pair(*shape, dtype=dtype, grad=True)
        inputs = (torch.cat((gate, up), -1).detach().requires_grad_(), None) if packed else (gate, up)
        before = [None if t is None else t.detach().clone() for t in inputs]
        y = handle(*inputs, **options)
        dy = fill(tuple(y.shape), dtype, "cpu", 5)
        leaves = [t for t in inputs if t is not None]
        got = [y, *torch.autograd.grad(y, leaves, dy, retain_graph=True)]
        again = torch.autograd.grad(y, leaves, dy)
        assert all(torch.equal(a, b) for a, b in zip(got[1:], again, strict=True))
        plain = tuple(None if t is None else t.detach() for t in inputs)
        truth = evaluate(op, plain, filled, (dy,), torch.float64)
        formula = evaluate(op, plain, filled, (dy,))
        sizes = op.magnitude(tuple(None if t is None else t.double() for t in plain), (dy.double(),), filled)
        assert torch.equal(y, formula["y"])  # the models' roundings, bit for bit
        for key, result in zip(truth, got, strict=True):
            verdict = judge(key, result.detach(), truth[key], formula[key], sizes[key])
            assert verdict.passed, str(verdict)
        assert all(t is None or torch.equal(t, b) for t, b in zip(plain, before, strict=True))


@pytest.mark.parametrize("implementation", ["eager", "functional"])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_is_needed_is_computed(needs, implementation):
    gate, up = pair(5, 6)
    gate, up = gate.requires_grad_(needs[0]), up.requires_grad_(needs[1])
    y = registry.get("swiglu", implementation=implementation)(gate, up)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    assert (gate.grad is not None, up.grad is not None) == needs


@pytest.mark.parametrize("implementation", ["eager", "functional"])
def test_views_keep_the_layout_that_the_contract_gives(implementation):
    packed = torch.randn(4, 6, 16, requires_grad=True)
    six = torch.randn(2, 2, 3, 2, 3, 8)
    views = [
        packed.chunk(2, -1),
        (packed.transpose(0, 1)[..., :8], packed.transpose(0, 1)[..., 8:]),
        (torch.randn(8, 5).t(), torch.randn(5, 8)),
        (torch.randn(1, 8).expand(5, 8), torch.randn(5, 16)[:, ::2]),
        (six.permute(4, 2, 0, 3, 1, 5), six.permute(4, 2, 0, 3, 1, 5) + 1),
        (packed.transpose(0, 1), None),
        (torch.randn(16, 3).t(), None),
    ]
    handle = registry.get("swiglu", implementation=implementation)
    for gate, up in views:
        y = handle(gate, up)
        assert y.stride() == swiglu.OP.schemes[0].allocate(gate, up)[0].stride()
        torch.testing.assert_close(y, swiglu.OP.reference(gate, up))
    gate, up = packed.chunk(2, -1)
    (right,) = torch.autograd.grad(handle(packed).square().sum(), packed)
    (found,) = torch.autograd.grad(handle(gate, up).square().sum(), packed)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("name", "options"), CALLS)
def test_opcheck(name, options):
    registry.get(name)
    values = [*options_of(OPS[name], options).values(), ""]
    gate, up = pair(3, 8, grad=True)
    forward, backward = (getattr(torch.ops.liger_registry, f"{name}_{phase}") for phase in (FORWARD, BACKWARD))
    torch.library.opcheck(forward, (gate, up, *values))
    torch.library.opcheck(forward, (gate, None, *values))
    dy = torch.randn(3, 8)
    for needs in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(backward, (dy, gate.detach(), up.detach(), needs, *values))
    torch.library.opcheck(backward, (dy[:, :4], gate.detach(), None, [True, False], *values))


@pytest.mark.parametrize(
    ("name", "backend"),
    [("swiglu", "aot_eager"), ("geglu", "aot_eager"), pytest.param("swiglu", "inductor", marks=pytest.mark.ci)],
)
def test_compiled_in_one_graph(name, backend):
    handle, right = registry.get(name), OPS[name].reference

    def both(gate, up):
        return handle(gate * 2, up) + handle(torch.cat((up, gate), -1))

    gate, up = pair(6, 8, grad=True)
    y = torch.compile(both, backend=backend, fullgraph=True)(gate, up)
    expected = right(gate * 2, up) + right(torch.cat((up, gate), -1))
    torch.testing.assert_close(y, expected)
    found, correct = (torch.autograd.grad(t.square().sum(), (gate, up)) for t in (y, expected))
    for a, b in zip(found, correct, strict=True):
        torch.testing.assert_close(a, b)
