"""The contract of rms_norm: its formula is the models' own, bit for bit, and its reference is differentiable."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from liger_registry import registry
from liger_registry.config import Fields
from liger_registry.errors import DeviceMismatchError, InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES, fill
from liger_registry.op import DimKind
from liger_registry.ops.rms_norm import CASTINGS, DTYPES, OP
from liger_registry.problem import BACKWARD, FORWARD

FAMILIES = {
    "llama": (LlamaRMSNorm, {"casting": "llama"}),
    "gemma": (GemmaRMSNorm, {"casting": "gemma", "offset": 1.0}),
    "gemma2": (Gemma2RMSNorm, {"casting": "gemma", "offset": 1.0}),
    "olmo2": (Olmo2RMSNorm, {"casting": "none"}),
}
OPTIONS = {o.name: o.default for o in OP.options}


def bits(tensor):
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_is_the_models(family, dtype):
    kind, options = FAMILIES[family]
    for seed, (style, hidden, eps) in enumerate(itertools.product(STYLES, (1, 3, 64, 1536), (1e-6, 1e-5))):
        module = kind(hidden, eps=eps).to(dtype)
        with torch.no_grad():
            module.weight.add_(fill((hidden,), dtype, "cpu", seed, scale=0.3))
        x, dy = fill((2, 5, hidden), dtype, "cpu", seed, style), fill((2, 5, hidden), dtype, "cpu", seed + 1)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        weight = module.weight.detach().clone().requires_grad_()
        mine, right = OP.reference(ours, weight, eps, **options), module(theirs)
        assert mine.dtype == right.dtype
        assert torch.equal(bits(mine), bits(right)), (style, hidden)
        mine.backward(dy)
        right.backward(dy)
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(weight.grad, module.weight.grad)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_dtypes_follow_the_model_too(family, x_dtype):
    kind, options = FAMILIES[family]
    module, x = kind(64), fill((7, 64), x_dtype, "cpu", 3)
    mine, right = OP.reference(x, module.weight, 1e-6, **options), module(x)
    assert mine.dtype == right.dtype
    assert torch.equal(mine, right)


@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("weight", [True, False])
def test_gradcheck_in_float64(casting, offset, weight):
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True) if weight else None

    def call(x, w):
        return OP.reference(x, w, 1e-3, offset, casting)

    assert torch.autograd.gradcheck(call, (x, w))


def test_the_value_by_hand():
    x, w = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([2.0, 0.5], dtype=torch.float64)
    y, rstd = OP.schemes[0].reference(x, w, eps=0.0, offset=1.0, casting="none")
    assert torch.allclose(rstd, torch.tensor([12.5**-0.5], dtype=torch.float64))
    assert torch.allclose(y, torch.tensor([[9.0, 6.0]], dtype=torch.float64) * 12.5**-0.5)


def test_zero_rows_are_zero_and_have_finite_gradients():
    x = torch.zeros(2, 8, requires_grad=True)
    y = OP.reference(x, torch.ones(8))
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


# --- keys, examples, shapes -------------------------------------------------------------------------------------------

PROBLEMS = st.builds(
    lambda rows, hidden, x, weight, casting, phase: OP.problem(
        OP.describe(
            (
                torch.empty(rows, hidden, dtype=x, device="meta"),
                None if weight is None else torch.empty(hidden, dtype=weight, device="meta"),
            ),
            {"casting": casting},
        ),
        phase,
        "default",
        (True, weight is not None),
    ),
    st.integers(0, 300),
    st.integers(1, 99),
    st.sampled_from([getattr(torch, d) for d in DTYPES]),
    st.sampled_from([None, *(getattr(torch, d) for d in DTYPES)]),
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
    y, rstd = OP.schemes[0].reference(*inputs, **options)
    sizes = OP.magnitude(inputs, (torch.ones_like(y),), options)
    shapes = {"y": y.shape, "rstd": rstd.shape, "grad_x": inputs[0].shape}
    if inputs[1] is not None:
        shapes["grad_weight"] = inputs[1].shape
    assert {name: size.shape for name, size in sizes.items()} == shapes
    for size in sizes.values():
        assert size.dtype == torch.float64
        assert (size >= 0).all()
    assert set(sizes) <= set(OP.reduced)


@given(PROBLEMS)
def test_allocate_is_what_the_reference_gives(problem):
    for shape in ((), (2,), (2, 3)):
        x, weight = OP.example(problem, "cpu")
        x = x.expand(*shape, *x.shape).contiguous()
        options = OP.options_of(problem)
        empty, full = (f(x, weight, **options) for f in (OP.schemes[0].allocate, OP.schemes[0].reference))
        assert [(t.shape, t.dtype) for t in empty] == [(t.shape, t.dtype) for t in full]
        assert [t.stride() for t in empty] == [t.stride() for t in full]


@given(PROBLEMS)
def test_proxies_keep_what_is_compiled(problem):
    for dims in OP.proxies(problem):
        smaller = problem.having(**dims)
        assert smaller.hidden == problem.hidden
        assert 0 < smaller.rows <= 300


def test_token_counts_are_never_exact():
    exact = [name for name, kind in OP.dims.items() if kind is DimKind.EXACT]
    assert exact == ["hidden"]
    OP.check()


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (torch.ones(()), None, InvalidInputError),
        (torch.ones(3, 0), None, InvalidInputError),
        (torch.ones(3, 4), torch.ones(5), InvalidInputError),
        (torch.ones(3, 4), torch.ones(1), InvalidInputError),
        (torch.ones(3, 4), torch.ones(1, 4), InvalidInputError),
        (torch.ones(3, 4).int(), None, UnsupportedDtypeError),
        (torch.ones(3, 4, dtype=torch.complex64), None, UnsupportedDtypeError),
        (torch.ones(3, 4).to(torch.float8_e4m3fn), None, UnsupportedDtypeError),
        (torch.ones(3, 4), torch.ones(4).long(), UnsupportedDtypeError),
    ],
)
def test_inputs_that_contradict_the_contract(x, weight, error):
    with pytest.raises(error, match="rms_norm"):
        OP.validate((x, weight), OPTIONS)


@pytest.mark.parametrize(
    "options", [{"eps": -1e-6}, {"eps": "1"}, {"casting": "olmo"}, {"offset": float("nan")}, {"out": 1}]
)
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        OP.bind((torch.ones(2, 2),), options)


def test_the_memo_tells_apart_what_a_choice_depends_on():
    handle = registry.get("rms_norm", memory_budget=1 << 42)
    x, w = torch.ones(2, 4), torch.ones(4)
    calls = [
        (x, w), (x, None), (x[:1], w), (x.bfloat16(), w), (x, w.bfloat16()), (x.clone().requires_grad_(), w),
        (x, w.clone().requires_grad_()), (x, torch.nn.Parameter(w)), (x, w, 1e-5), (x, w, 1e-6, 1.0),
        (x, w, 1e-6, 0.0, "gemma"),
    ]  # fmt: skip
    for count, call in enumerate(calls, 1):
        handle(*call)
        assert len(handle._memo) == count
    handle(x.clone(), weight=w.clone())
    assert len(handle._memo) == len(calls)
    with pytest.raises(DeviceMismatchError):  # of the same shapes as an entry
        handle(x.to("meta"), w)


def test_descriptions_hold_actual_sizes():
    x, w = torch.ones(2, 4), torch.ones(4)
    assert dict(OP.describe((x, w), OPTIONS).dims) == {"hidden": 4, "rows": 2}
    assert OP.describe((torch.empty(0, 4), None), OPTIONS).dims == Fields(rows=0, hidden=4)
