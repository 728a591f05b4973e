"""The contract of linear_sequence_loss, its slabs of whole groups, its memory, and both faces of a call."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from linear_losses import Live, error, head, wide
from torch.nn import functional

from liger_registry import registry
from liger_registry.device import Device
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.kernels.group_loss import function_of, logistic, terms_and_slopes
from liger_registry.ops import linear_sequence_loss as contract
from liger_registry.ops.linear_sequence_loss import OP
from liger_registry.portable.linear_sequence_loss import Groups
from liger_registry.problem import BACKWARD, FORWARD

CPU = Device.parse("cpu")
EXAMPLE = "liger_registry.kernels.group_loss:logistic"
WAYS = [
    ("group_slabs", {"slab_rows": 128, "sums": "float32"}),
    ("group_slabs", {"slab_rows": 256, "sums": "input"}),
    ("vocab_slabs", {"slabs": 1}),
    ("vocab_slabs", {"slabs": 8}),
]


def call(hidden, weight, target, constants, bias=None, implementation=None, config=None, **options):
    pins = None if implementation is None else {"forward": implementation}
    handle = registry.get("linear_sequence_loss", implementation=pins, config=config)
    return handle(hidden, weight, target, constants, bias, **options)


def inputs_of(sequences=6, length=50, hidden=16, vocab=61, dtype=torch.float32, bias=True, seed=0):
    states, weight, target, offset = head((sequences, length), hidden, vocab, dtype, bias=bias, seed=seed)
    generator = torch.Generator().manual_seed(seed + 9)
    constants = torch.rand(sequences, length, 3, generator=generator) / length
    constants[..., 2] = 0.5
    return states, weight, target, constants.to(torch.promote_types(dtype, torch.float32)), offset


def squared(logp, constants, *, goal=0.0):
    """A loss that reads none but the first sequence of a group."""
    return ((logp[0] * constants[0, ..., 0]).sum(-1) - goal) ** 2


def nothing(logp, constants):
    return constants[0, :, 0, 0] * 2


def test_the_formula_by_hand():
    weight = torch.tensor([[0.0], [math.log(3.0)]])  # of hidden states 1 probabilities of 1/4 and 3/4
    hidden, target = torch.ones(2, 2, 1), torch.tensor([[1, -100], [0, 0]])
    constants = torch.tensor([[[1.0, 0.5, 2.0], [9, 9, 9]], [[0.5, 0.25, 9], [0.5, 9, 9]]])
    loss, logp = call(hidden, weight, target, constants, ways=2, length=2)
    assert logp.tolist() == [[pytest.approx(math.log(0.75)), 0.0], [pytest.approx(math.log(0.25))] * 2]
    margin = (math.log(0.75) - 0.5) - (math.log(0.25) - 0.25)
    assert loss.item() == pytest.approx(2 * math.log1p(math.exp(-margin)))


def test_gradcheck():
    hidden, weight, target, constants, bias = inputs_of(4, 3, 3, 7, torch.float64)
    for function in (OP.reference, call):
        assert torch.autograd.gradcheck(
            lambda h, w, b, f=function: f(h, w, target, constants, b, ways=2, length=3, softcap=3.0, scale=0.7)[0],
            (hidden, weight, bias),
        )


@pytest.mark.parametrize(("name", "config"), WAYS, ids=str)
@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_every_implementation_gives_the_references_numbers(name, config, ways, mode):
    if config.get("sums") == "float32":
        dtype, limit = torch.bfloat16, 1e-2
    else:
        dtype, limit = torch.float32, 2e-6
    inputs = inputs_of(dtype=dtype)
    options = {"ways": ways, "length": 50, "softcap": 5.0, "scale": 0.7, "settings": '{"beta": 3.0}'}
    loss, logp = call(*inputs, implementation=name, config=config, compact=mode, **options)
    exact = wide(inputs)
    right, known = OP.reference(*exact, **options)
    assert not logp.requires_grad
    torch.testing.assert_close(loss.double(), right, rtol=max(limit, 1e-5), atol=1e-5)
    assert error(logp, known) < limit
    leaves, others = ([x[n] for n in (0, 1, 4)] for x in (inputs, exact))
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(right, others), strict=True):
        assert error(a, b) < limit
    ours = torch.autograd.grad(call(*inputs, implementation=name, config=config, **options)[0], inputs[0])[0]
    assert not ours[inputs[2] == -100].any()


@pytest.mark.parametrize(("name", "config"), WAYS[1:3], ids=str)
def test_a_function_of_ones_own(name, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_losses", SimpleNamespace(squared=squared, nothing=nothing))
    inputs, told = inputs_of(), {"implementation": name, "config": config, "ways": 2, "length": 50}
    loss, _ = call(*inputs, function="own_losses:squared", settings='{"goal": 2.0}', **told)
    exact = wide(inputs)
    logits = functional.linear(exact[0], exact[1], exact[4])
    logp = torch.log_softmax(logits, -1).gather(-1, exact[2].clamp(min=0)[..., None]).squeeze(-1)
    logp = logp.masked_fill(exact[2] == -100, 0.0)
    right = ((logp * exact[3][..., 0]).sum(-1)[:3] - 2.0).square().sum()
    torch.testing.assert_close(loss.double(), right)
    a, b = torch.autograd.grad(loss, inputs[0])[0], torch.autograd.grad(right, exact[0])[0]
    assert error(a, b) < 2e-6
    assert not a[3:].any()
    idle, _ = call(*inputs, function="own_losses:nothing", **told)
    assert idle.item() == pytest.approx(2 * inputs[3][:3, 0, 0].sum().item())
    assert not any(g.any() for g in torch.autograd.grad(idle, (inputs[0], inputs[1])))


@pytest.mark.parametrize("needed", range(8))
def test_only_what_is_needed_is_computed(needed):
    inputs = inputs_of()
    needs = [bool(needed & 1 << n) for n in range(3)]
    for number, need in zip((0, 1, 4), needs, strict=True):
        inputs[number].requires_grad_(need)
    loss, _ = call(*inputs, ways=2, length=50)
    assert loss.requires_grad is any(needs)
    if not any(needs):
        return
    loss.backward()
    exact = wide(inputs)
    OP.reference(*exact, ways=2, length=50)[0].backward()
    for number, need in zip((0, 1, 4), needs, strict=True):
        assert (inputs[number].grad is not None) is need
        assert not need or error(inputs[number].grad, exact[number].grad) < 2e-6


# -- slabs of groups ---------------------------------------------------------------------------------------------------


def test_slabs_take_whole_groups_until_they_are_full():
    target = torch.zeros(6 * 10, dtype=torch.int64)
    groups = Groups.of(target, 2, 10, -100, "off", 0)
    assert groups.count == 3
    assert [(g.start, g.stop, r.start, r.stop) for g, r in groups.slabs(30)] == [(0, 2, 0, 40), (2, 3, 40, 60)]
    assert [(g.start, g.stop) for g, _ in groups.slabs(1)] == [(0, 1), (1, 2), (2, 3)]
    target[:10] = -100  # the first sequence of the first group
    packed = Groups.of(target, 2, 10, -100, "on", 0)
    assert packed.bounds == (0, 10, 30, 50)
    assert [(g.start, g.stop, r.stop) for g, r in packed.slabs(30)] == [(0, 2, 30), (2, 3, 50)]


@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_rows_of_groups_are_those_of_the_caller(ways, mode):
    target = torch.arange(6 * 5).view(6, 5)
    target[1, 2:], target[4] = -100, -100
    groups = Groups.of(target.reshape(-1), ways, 5, -100, mode, 0)
    order = groups.rows(target.device)
    flat = target.reshape(-1) if order is None else target.reshape(-1)[order]
    whole = groups.split(target.reshape(-1))
    for here, rows in groups.slabs(7):
        values = groups.spread(flat[rows].float(), here, rows)
        right = whole[:, here].float()
        torch.testing.assert_close(values, right if mode == "off" else torch.where(right == -100, 0.0, right))
        assert torch.equal(groups.gathered(values, here, rows), flat[rows].float())


def test_the_heads_gradient_is_rounded_no_more_than_four_times():
    inputs = inputs_of(24, 40, 64, 500, torch.bfloat16)
    exact = wide(inputs)
    options = {"ways": 2, "length": 40}
    (right,) = torch.autograd.grad(OP.reference(*exact, **options)[0], exact[1])
    (eager,) = torch.autograd.grad(OP.reference(*inputs, **options)[0], inputs[1])
    (mine,) = torch.autograd.grad(call(*inputs, **options)[0], inputs[1])
    assert error(mine, right) <= 1.5 * error(eager, right)
    refused = {"implementation": "group_slabs", "config": {"slab_rows": 128, "sums": "input"}}
    with pytest.raises(Exception, match="rounded more often"):
        call(*inputs, **refused, **options)
    call(*inputs, **refused, accumulate="input", **options)


def test_groups_beyond_the_budget_go_another_way():
    """The default budget holds slabs of 2,048 rows and groups of as many; one of 16,384 is gone over twice."""

    def chosen(tokens, group, budget=None):
        described = contract.described((tokens, 64, 32000, group), "bfloat16")
        problem = OP.problem(described, FORWARD, "grad_in_forward", (True, True, False))
        budget = OP.budget(problem) if budget is None else budget
        problem = OP.problem(described, FORWARD, "grad_in_forward", (True, True, False), budget)
        return registry.decide(problem, CPU).implementation.name

    assert chosen(8192, 2048) == "group_slabs"
    assert chosen(16384, 4096) == "group_slabs"
    assert chosen(16384, 16384) == "vocab_slabs"
    assert chosen(8192, 2048, 200_000_000) == "vocab_slabs"


@pytest.mark.parametrize("name", ["group_slabs", "vocab_slabs"])
@pytest.mark.parametrize("sequences", [2, 16])
def test_memory_is_what_the_implementation_says(name, sequences):
    inputs = inputs_of(sequences, 512, 32, 1000)
    options = {"ways": 2, "length": 512}
    problem, _ = registry.problem_of(
        OP, inputs, OP.bind(inputs, options)[1], FORWARD, (True, True, True), None, "grad_in_forward"
    )
    implementation = next(
        i for i in registry.catalog.implementations("linear_sequence_loss") if i.name == name and i.phase == FORWARD
    )
    config = implementation.heuristic(problem, CPU)
    held = sum(t.numel() * 4 for t in (inputs[0], inputs[1], inputs[4]))
    with Live() as live:
        call(*inputs, implementation=name, config=dict(config), **options)
    assert live.peak <= implementation.extra_bytes(problem, config) + held + 2 * inputs[2].numel() * 4


# -- functions ---------------------------------------------------------------------------------------------------------


def test_derivatives_of_a_function():
    logp, constants = torch.randn(2, 3, 4), torch.rand(2, 3, 4, 3)
    leaf = logp.clone().requires_grad_()
    right = logistic(leaf, constants).sum()
    total, slopes = terms_and_slopes(logistic, logp, constants, True)
    assert not total.requires_grad
    assert total == right
    assert torch.equal(slopes, torch.autograd.grad(right, leaf)[0])
    total, slopes = terms_and_slopes(logistic, logp, constants, False)
    assert total == right
    assert not slopes.any()


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("", "{}"),
        ("nowhere:function", "{}"),
        ("math:nothing", "{}"),
        ("math:pi", "{}"),
        (EXAMPLE, "{"),
        (EXAMPLE, "[1]"),
    ],
)
def test_functions_that_cannot_be_found_are_refused(path, settings):
    with pytest.raises(UnsupportedOptionError, match="no loss of groups"):
        function_of(path, settings)
    with pytest.raises(UnsupportedOptionError, match="no loss of groups"):
        call(*inputs_of(), function=path, settings=settings, ways=2, length=50)


# -- the contract ------------------------------------------------------------------------------------------------------


def test_the_tangent_has_the_same_loss_and_gradients():
    """What verification at full size holds results against, in chunks of rows."""
    inputs = wide(inputs_of())
    options = OP.bind(inputs, {"ways": 2, "length": 50, "softcap": 4.0, "settings": '{"beta": 2.0}'})[1]
    others, told = contract.cut(inputs, options)
    leaves = (inputs[0], inputs[1], inputs[4])
    right, mine = OP.reference(*inputs, **options)[0], OP.reference(*others, **told)[0]
    torch.testing.assert_close(mine, right)
    torch.testing.assert_close(torch.autograd.grad(mine, leaves), torch.autograd.grad(right, leaves))
    cut = [t.flatten(0, 1)[70:190] for t in others[:1]], others[2].flatten()[70:190], others[3].flatten(0, 1)[70:190]
    part = OP.reference(cut[0][0], others[1], cut[1], cut[2], others[4], **told)[0]
    torch.testing.assert_close(
        torch.autograd.grad(part, others[0])[0].flatten(0, 1)[70:190],
        torch.autograd.grad(OP.reference(*inputs, **options)[0], inputs[0])[0].flatten(0, 1)[70:190],
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "float16"])
def test_an_example_of_a_problem_is_that_problem(dtype):
    for description in contract.odd(dtype):
        for phase in (FORWARD, BACKWARD):
            problem = OP.problem(description, phase, "grad_in_forward", (True, True, False), 1 << 20)
            assert OP.has(problem)


def test_allocated_tensors_are_like_the_references():
    inputs = inputs_of()
    options = OP.bind(inputs, {"ways": 2, "length": 50})[1]
    for needs in ((True, True, True), (False, True, False), (False, False, False)):
        made = contract.allocate(*inputs, needs=needs, **options)
        right = contract.scheme_reference(*inputs, needs=needs, **options)
        for a, b in zip(made, right, strict=True):
            assert (a is None) is (b is None)
            assert a is None or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_calls_that_contradict_the_contract():
    hidden, weight, target, constants, bias = inputs_of()
    with pytest.raises(InvalidInputError, match="300 tokens"):
        call(hidden, weight, target, constants, bias, ways=4, length=50)
    with pytest.raises(InvalidInputError, match="300 tokens"):
        call(hidden, weight, target, constants, bias, ways=2, length=0)
    with pytest.raises(InvalidInputError, match="constants"):
        call(hidden, weight, target, constants[:-1], bias, ways=2, length=50)
    with pytest.raises(UnsupportedDtypeError, match="constants"):
        call(hidden, weight, target, constants.double(), bias, ways=2, length=50)
    with pytest.raises(UnsupportedOptionError, match="ways"):
        call(hidden, weight, target, constants, bias, ways=0, length=50)
    with pytest.raises(InvalidInputError, match="holds 61"):
        contract.check_values((hidden, weight, torch.full_like(target, 61), constants, bias), {"ignore_index": -100})


@pytest.mark.parametrize("shape", [(0, 50), (6, 0)])
@pytest.mark.parametrize(("name", "config"), [("group_slabs", {"slab_rows": 128, "sums": "input"}), WAYS[2]], ids=str)
def test_no_tokens(shape, name, config):
    hidden, weight, target, constants, bias = inputs_of()
    cut = [t[: shape[0], : shape[1]] for t in (hidden, target, constants)]
    loss, logp = call(cut[0], weight, cut[1], cut[2], bias, implementation=name, config=config, ways=2, length=shape[1])
    assert loss.item() == 0
    assert logp.shape == shape
    assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight, bias)))


@pytest.mark.parametrize(("name", "config"), WAYS[1:3], ids=str)
@pytest.mark.parametrize("mode", ["on", "off"])
def test_groups_without_a_token_that_counts(name, config, mode):
    inputs = inputs_of()
    inputs[2].fill_(-100)
    loss, logp = call(*inputs, implementation=name, config=config, compact=mode, ways=2, length=50)
    exact = wide(inputs)
    torch.testing.assert_close(loss.double(), OP.reference(*exact, ways=2, length=50)[0])
    assert not logp.any()
    assert not any(g.any() for g in torch.autograd.grad(loss, (inputs[0], inputs[1], inputs[4])))


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("empty", [slice(0, 2), slice(4, 6), slice(2, 6)])
def test_terms_of_groups_without_a_token_are_in_every_slab(mode, empty):
    """Also where those groups are all that is left behind slabs that are full."""
    inputs = inputs_of(12, 64)
    inputs[2].fill_(5).view(2, 6, 64)[:, empty] = -100
    options = {"ways": 2, "length": 64, "compact": mode}
    loss, _ = call(*inputs, implementation="group_slabs", config={"slab_rows": 128, "sums": "input"}, **options)
    exact = wide(inputs)
    right = OP.reference(*exact, **options)[0]
    torch.testing.assert_close(loss.double(), right)
    for a, b in zip(torch.autograd.grad(loss, inputs[:2]), torch.autograd.grad(right, exact[:2]), strict=True):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize("option", ["settings", "softcap", "scale", "ways", "function"])
def test_every_option_counts(option):
    inputs = inputs_of()
    base = {"ways": 2, "length": 50}
    changed = {
        "settings": {"settings": json.dumps({"beta": 5.0})},
        "softcap": {"softcap": 2.0},
        "scale": {"scale": 0.5},
        "ways": {"ways": 3},
        "function": {"function": "liger_registry.chunked_loss.pairs:pair_terms", "settings": "{}"},
    }[option]
    if option == "function":
        with pytest.raises(TypeError):  # which takes other settings
            call(*inputs, **base, **changed)
        return
    assert call(*inputs, **base)[0] != call(*inputs, **{**base, **changed})[0]


def test_the_library_operator():
    inputs = inputs_of()
    call(*inputs, ways=2, length=50)
    options = OP.bind(inputs, {"ways": 2, "length": 50, "compact": "off"})[1]
    operator = torch.ops.liger_registry.linear_sequence_loss_forward.default
    torch.library.opcheck(
        operator,
        (*inputs, *options.values(), [True, True, False, False, True], ""),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.ci
def test_one_graph():
    inputs = inputs_of()
    leaves = (inputs[0], inputs[1], inputs[4])

    def step(*inputs):
        return call(*inputs, ways=2, length=50, settings='{"beta": 2.0}')[0] * 3

    right = step(*inputs)
    mine = torch.compile(step, fullgraph=True)(*inputs)
    torch.testing.assert_close(mine, right)
    torch.testing.assert_close(torch.autograd.grad(mine, leaves), torch.autograd.grad(right, leaves))
