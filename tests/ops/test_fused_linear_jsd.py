"""``fused_linear_jsd`` and its stage ``logit_divergence``: values, slabs, ignored rows, options, memory, both faces."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from liger_registry import Device, registry
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.kernels import fused_linear_jsd_heuristics as h
from liger_registry.op import DimKind
from liger_registry.ops import fused_linear_jsd, jsd, logit_divergence
from liger_registry.portable import fused_linear_jsd as portable
from liger_registry.portable.logit_divergence import forward_eager
from liger_registry.portable.spaces.fused_linear_jsd import IMPLEMENTATIONS
from liger_registry.problem import budget_class

OP, STAGE = fused_linear_jsd.OP, logit_divergence.OP
SCHEME = OP.schemes[0]
CPU = Device.parse("cpu")
LABELS = torch.tensor([0, -100, 2, 3, -100, 5, 6])


def heads(tokens=7, vocab=19, hidden=8, teacher=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, hidden), (vocab, hidden), (tokens, teacher), (vocab, teacher)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return made[0].requires_grad_(), made[1].requires_grad_(), *made[2:]


def composed(states, weight, teacher, teacher_weight, labels=None, temperature=1.0, **options):
    """The same from torch's operations and ``jsd``."""
    x = (states @ weight.t() / temperature).log_softmax(-1)
    y = (teacher @ teacher_weight.t() / temperature).log_softmax(-1)
    return jsd.OP.reference(x, y, labels, **options)


def stage(*tensors, **options):
    return forward_eager(*tensors, device=CPU, **options)


def options_with(**changes):
    return {o.name: o.default for o in OP.options} | changes


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("implementation", ["reference", "chunked", "single"])
def test_it_is_jsd_behind_two_heads(implementation, beta):
    inputs = heads()
    handle = OP.reference if implementation == "reference" else registry.get(OP.name, implementation=implementation)
    for labels in (None, LABELS):
        told = {"beta": beta, "temperature": 2.0}
        ours, right = handle(*inputs, labels, **told), composed(*inputs, labels, **told)
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=0)
        pairs = zip(*(torch.autograd.grad(3 * loss, inputs[:2]) for loss in (ours, right)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_gradcheck():
    states, weight, *teacher = heads(4, 5, 3, 2)
    for beta in (0.0, 0.3, 1.0):
        torch.autograd.gradcheck(lambda s, w, b=beta: OP.reference(s, w, *teacher, LABELS[:4], b), (states, weight))


@pytest.mark.parametrize("compact", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slab_rows", [1, 3, 100])
def test_slabs_and_dropped_rows_change_nothing(slab_rows, dtype, compact):
    inputs = tuple(t.detach() for t in heads(dtype=dtype))
    told = options_with(compact=compact, temperature=1.5)
    sums = "input" if dtype == torch.float64 else "float32"
    before = [t.clone() for t in inputs]
    ours = {"device": CPU, "stages": {"divergence": stage}, "slab_rows": slab_rows, "sums": sums}
    found = portable.forward_chunked(*inputs, LABELS, needs=(True, True), **ours, **told)
    exact = SCHEME.reference(*(t.double() for t in inputs), LABELS, needs=(True, True), **told)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert (found[1][LABELS == -100] == 0).all()


def test_half_precision_gradients_of_many_rows_are_not_lost():
    # 1 / 65536 of a slope of 1e-3 is a quarter of fp16's smallest number.
    inputs = tuple(t.detach() for t in heads(16, dtype=torch.float16))
    inputs = tuple(t.repeat(4096, 1) if number % 2 == 0 else t for number, t in enumerate(inputs))
    told = {"device": CPU, "stages": {"divergence": stage}, "needs": (False, True)}
    found = portable.forward_chunked(*inputs, None, slab_rows=32768, sums="float32", **told, **options_with())
    exact = SCHEME.reference(*(t.double() for t in inputs), None, needs=(False, True), **options_with())
    assert found[1] is None
    assert (found[2].double() - exact[2]).norm() <= 2e-3 * exact[2].norm()


@pytest.mark.parametrize("implementation", ["chunked", "single"])
def test_nothing_to_count(implementation):
    states, weight, *teacher = heads()
    handle = registry.get(OP.name, implementation=implementation)
    for compact in ("on", "off"):
        loss = handle(states, weight, *teacher, torch.full((7,), -100), compact=compact)
        assert loss.item() == 0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (states, weight)))
    none = states.detach()[:0].requires_grad_()
    loss = handle(none, weight, teacher[0][:0], teacher[1])
    assert loss.item() == 0
    assert (torch.autograd.grad(loss, weight)[0] == 0).all()


def test_equal_heads_have_no_divergence():
    states, weight, *_ = heads(dtype=torch.float32)
    loss = registry.get(OP.name)(states, weight, states.detach(), weight.detach())
    assert loss.item() == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (states, weight)))


def test_only_what_is_needed_and_twice_alike():
    states, weight, *teacher = heads(dtype=torch.bfloat16)
    handle = registry.get(OP.name)
    loss = handle(states, weight, *teacher, LABELS)
    assert loss.dtype == torch.float32
    upstream = torch.tensor(-0.7)
    first = torch.autograd.grad(loss, (states, weight), upstream, retain_graph=True)
    again = torch.autograd.grad(loss, (states, weight), upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for wanted, other in ((states, weight), (weight, states)):
        other.requires_grad_(False)
        alone = handle(states, weight, *teacher, LABELS)
        (grad,) = torch.autograd.grad(alone, wanted, upstream)
        assert torch.equal(grad, first[0] if wanted is states else first[1])
        other.requires_grad_(True)
    with torch.no_grad():
        assert torch.equal(handle(states, weight, *teacher, LABELS), loss)


def test_options_change_the_result():
    inputs = heads()
    handle = registry.get(OP.name)
    changes = [{}, {"beta": 0.1}, {"temperature": 2.0}, {"reduction": "sum"}, {"ignore_index": 3}]
    results = [handle(*inputs, LABELS, **change) for change in changes]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))
    # How gradients are summed is seen in their roundings alone.
    told = {"device": CPU, "stages": {"divergence": stage}, "needs": (False, True), "slab_rows": 32, **options_with()}
    coarse = tuple(t.detach() for t in heads(512, dtype=torch.bfloat16))
    sums = [portable.forward_chunked(*coarse, None, sums=sums, **told)[2] for sums in ("input", "float32")]
    assert not torch.equal(*sums)


@pytest.mark.parametrize(
    ("change", "error", "way_out"),
    [
        ({0: torch.ones(7, 9)}, InvalidInputError, "torch.nn.Linear"),
        ({1: torch.ones(18, 8)}, InvalidInputError, "one vocabulary"),
        ({2: torch.ones(6, 5)}, InvalidInputError, "same positions"),
        ({3: torch.ones(19, 5).half()}, UnsupportedDtypeError, "torch.autocast"),
        ({4: LABELS[:3]}, InvalidInputError, "leading shape"),
    ],
)
def test_inputs_that_contradict_the_contract(change, error, way_out):
    inputs = [*(t.detach() for t in heads(dtype=torch.float32)), LABELS]
    for number, value in change.items():
        inputs[number] = value
    with pytest.raises(error, match=OP.name) as raised:
        registry.get(OP.name)(*inputs)
    assert way_out in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": -1.0}, {"beta": 2.0}, {"reduction": "mean"}, {"accumulate": "bf16"}],
)
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedOptionError):
        registry.get(OP.name)(*heads(), **options)


@pytest.mark.parametrize("op", [OP, STAGE], ids=lambda op: op.name)
def test_examples_are_their_problems(op):
    op.check()
    assert DimKind.EXACT not in {kind for name, kind in op.dims.items() if name in ("tokens", "rows")}
    needs = (True,) * len(op.differentiable)
    for dtype in ("float32", "bfloat16", "float64"):
        for description in op.odd(dtype):
            bare = op.problem(description, "forward", op.schemes[0].name, needs)
            problem = op.problem(description, "forward", op.schemes[0].name, needs, op.budget(bare))
            assert op.has(problem)
            if op is OP:
                for implementation in IMPLEMENTATIONS[:2]:
                    config = implementation.heuristic(problem, CPU)
                    assert all(STAGE.has(p) for p in implementation.stages(problem, config).values())


@pytest.mark.parametrize("tokens", [64, 1024, 8192, 131072])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_default_slab_fits_the_default_budget(tokens, dtype):
    description = next(iter(OP.odd(dtype)))
    dims = description.dims.having(tokens=tokens, vocab=128256, hidden=4096, teacher_hidden=8192)
    description = replace(description, dims=dims)
    budget = h.default_budget(OP.problem(description, "forward", SCHEME.name, (True, True)))
    assert budget_class(budget) == budget
    chunked = IMPLEMENTATIONS[0]
    default, small = (
        OP.problem(description, "forward", SCHEME.name, (True, True), size) for size in (budget, budget // 2)
    )
    if tokens > 2048:
        config = chunked.heuristic(default, CPU)
        assert chunked.why_illegal(config, default, CPU, budget) is None
        assert int(config.slab_rows) == max(2048, tokens // 4)
        assert config.sums == ("float32" if dtype == "float16" else "input")
    if tokens > 2048 and dtype == "bfloat16":
        # Smaller slabs would round the head's gradient more than four times.
        assert chunked.heuristic(small, CPU).sums == "float32"


def test_opcheck():
    registry.get(OP.name)
    operator = torch.ops.liger_registry.fused_linear_jsd_forward.default
    inputs = heads(dtype=torch.float32)
    options = options_with(compact="off").values()
    for needs in ([True, True, False, False, False], [False] * 5):
        torch.library.opcheck(
            operator, (*inputs, LABELS, *options, needs, ""), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.ci
def test_compiled_in_one_graph():
    inputs, handle = heads(dtype=torch.float32), registry.get(OP.name)
    compiled = torch.compile(lambda *given: handle(*given, LABELS) * 2, fullgraph=True)
    found = torch.autograd.grad(compiled(*inputs), inputs[:2])
    right = torch.autograd.grad(handle(*inputs, LABELS) * 2, inputs[:2])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
