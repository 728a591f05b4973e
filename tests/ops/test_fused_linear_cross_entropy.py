"""The contract of fused_linear_cross_entropy, its slabs, its memory, and both faces of a call."""

from __future__ import annotations

import math

import pytest
import torch
from linear_losses import Live, error, head, wide
from torch.nn import functional

from liger_registry import registry
from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.kernels.compact import compact
from liger_registry.ops import fused_linear_cross_entropy as contract
from liger_registry.ops.fused_linear_cross_entropy import OP
from liger_registry.problem import BACKWARD, FORWARD, budget_class
from liger_registry.tuning.arguments import Arguments
from liger_registry.tuning.candidates import candidates

NAME = "fused_linear_cross_entropy"
CPU = Device.parse("cpu")
EVERYTHING = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-2,
    "softcap": 5.0,
    "scale": 0.7,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}
FORWARDS = [("single", {}), ("chunked", {"slab_rows": 128, "sums": "input"}), ("vocab_slabs", {"slabs": 8})]


def fused(*inputs, implementation=None, config=None, **options):
    pins = None if implementation is None else {"forward": implementation}
    return registry.get(NAME, implementation=pins, config=config)(*inputs, **options)


def gradients(loss, inputs, upstream=None):
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return torch.autograd.grad(loss, wanted, upstream)


# --- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", contract.REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_formula_is_torchs(reduction, weighted, smoothing):
    hidden, weight, target, bias = head((3, 7), 8, 19, torch.float64, bias=True)
    class_weight = torch.rand(19, dtype=torch.float64) + 0.5 if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    right = functional.cross_entropy(
        functional.linear(hidden, weight, bias).flatten(0, 1), target.flatten(), class_weight, **options
    )
    found = OP.reference(hidden, weight, target, bias, class_weight, **options)
    torch.testing.assert_close(found.flatten(), right.flatten())
    for mine, theirs in zip(
        gradients(found.sum(), (hidden, weight, bias)), gradients(right.sum(), (hidden, weight, bias)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_values_by_hand():
    hidden, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    # Softmax of (0, ln 3) is (1/4, 3/4), of (0, 2 ln 3) it is (1/10, 9/10).
    losses = fused(hidden, weight, torch.tensor([1, 0]), reduction="none")
    assert losses.tolist() == pytest.approx([math.log(4 / 3), math.log(10)])
    assert fused(hidden, weight, torch.tensor([1, 0])).item() == pytest.approx(math.log(40 / 3) / 2)
    loss, z, accuracy, predicted = fused(
        hidden,
        weight,
        torch.tensor([1, -100]),
        lse_square_scale=0.5,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )
    assert z.item() == pytest.approx(0.5 * math.log(4) ** 2)
    assert loss.item() == pytest.approx(math.log(4 / 3) + z.item())
    assert (accuracy.item(), predicted.tolist()) == (1.0, [1, -1])


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"reduction": "sum"}, {"reduction": "none"}])
def test_gradcheck(options):
    inputs = head(5, 3, 7, torch.float64, bias=True)
    given = {**options, "return_token_accuracy": False, "return_predicted_tokens": False, "return_z_loss": False}
    assert torch.autograd.gradcheck(
        lambda h, w, b: OP.reference(h, w, inputs[2], b, **given), (inputs[0], inputs[1], inputs[3])
    )
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused(h, w, inputs[2], b, **given), (inputs[0], inputs[1], inputs[3])
    )


# --- implementations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "config"), FORWARDS, ids=lambda v: str(v))
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_every_implementation_gives_the_references_numbers(name, config, options, mode):
    inputs = head((2, 150), 16, 517, bias=True)
    class_weight = torch.rand(517) + 0.5
    right = OP.reference(*(wide_inputs := wide(inputs)), class_weight.double(), **options)
    found = fused(*inputs, class_weight, implementation=name, config=config or None, compact=mode, **options)
    found, right = (r if isinstance(r, tuple) else (r,) for r in (found, right))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=2e-6, atol=1e-7)
    upstream = torch.tensor(1 / 3)
    mine = gradients(found[0], inputs, upstream)
    for value, exact in zip(mine, gradients(right[0], wide_inputs, upstream.double()), strict=True):
        assert error(value, exact) < 1e-6
    assert (mine[0][inputs[2] == -100] == 0).all()


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("implementation", ["row_slabs", "vocab_slabs"])
def test_losses_of_tokens_have_gradients_of_their_own(implementation, mode):
    inputs = head((2, 150), 16, 517)
    options = {**EVERYTHING, "reduction": "none"}
    found = fused(*inputs, implementation=implementation, compact=mode, **options)
    right = OP.reference(*(exact := wide(inputs)), **options)
    upstream = torch.randn(2, 150)
    assert found[0].shape == found[3].shape == (2, 150)
    torch.testing.assert_close(found[0].double(), right[0], rtol=1e-5, atol=1e-6)
    pairs = zip(gradients(found[0], inputs, upstream), gradients(right[0], exact, upstream.double()), strict=True)
    assert all(error(mine, theirs) < 1e-6 for mine, theirs in pairs)


@pytest.mark.parametrize("needed", range(8))
def test_only_what_is_needed_is_computed(needed):
    inputs = head(40, 8, 61, bias=True)
    needs = [bool(needed & 1 << n) for n in range(3)]
    for tensor, need in zip((inputs[0], inputs[1], inputs[3]), needs, strict=True):
        tensor.requires_grad_(need)
    before = [t.detach().clone() for t in inputs]
    loss = fused(*inputs)
    assert loss.requires_grad is any(needs)
    if any(needs):
        loss.backward()
    exact = wide(before)
    OP.reference(*exact).backward()
    for tensor, right, need in zip(
        (inputs[0], inputs[1], inputs[3]), (exact[0], exact[1], exact[3]), needs, strict=True
    ):
        assert (tensor.grad is not None) is need
        assert not need or error(tensor.grad, right.grad) < 1e-6
    assert all(torch.equal(a.detach(), b) for a, b in zip(inputs, before, strict=True))


def test_a_frozen_head_costs_no_product():
    hidden, weight, target, _ = head(40, 8, 61)
    counts = []
    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        with torch.profiler.profile() as profile:
            fused(hidden, weight, target, implementation="single")
        counts.append(sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm")))
    assert counts == [3, 2]


def test_a_second_backward_gives_equal_gradients():
    inputs = head(300, 16, 61)
    loss = fused(*inputs, implementation="chunked", config={"slab_rows": 128, "sums": "input"})
    first = [g.clone() for g in torch.autograd.grad(loss * 0.3, inputs[:2], retain_graph=True)]
    second = torch.autograd.grad(loss * 0.3, inputs[:2])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(("tokens", "vocab"), [(2048, 2000), (512, 8192), (1024, 16384)])
def test_four_roundings_of_the_heads_gradient_stay_near_eagers(tokens, vocab):
    """Logits are small, so that their own rounding, which all have, does not hide those of the gradient."""
    inputs = head(tokens, 64, vocab, torch.bfloat16, size=64**-0.5)
    exact = wide(inputs)
    (right,) = torch.autograd.grad(OP.reference(*exact), exact[1])
    (eager,) = torch.autograd.grad(
        functional.cross_entropy(functional.linear(inputs[0], inputs[1]).float(), inputs[2]), inputs[1]
    )
    slab = {"slab_rows": tokens // 4}
    loss = fused(*inputs, implementation="chunked", config={**slab, "sums": "input"}, compact="off")
    (mine,) = torch.autograd.grad(loss, inputs[1])
    assert error(mine, right) <= 2.0 * error(eager, right)
    given = {"config": {**slab, "sums": "float32"}, "accumulate": "float32", "compact": "off"}
    (wider,) = torch.autograd.grad(fused(*inputs, implementation="chunked", **given), inputs[1])
    assert error(wider, right) <= 1.1 * error(eager, right)
    assert error(mine, right) > 1.2 * error(eager, right), "the roundings do not show here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_confident_tokens_keep_their_gradient(p, dtype):
    vocab = 32_000
    weight = torch.zeros(vocab, 1, dtype=dtype)
    weight[7] = 1.0
    logit = torch.tensor(math.log(p / (1 - p) * (vocab - 1))).to(dtype)
    hidden = logit.view(1, 1).requires_grad_()
    (mine,) = torch.autograd.grad(fused(hidden, weight, torch.tensor([7])), hidden)
    rest = (vocab - 1) / (vocab - 1 + logit.double().exp())
    # The other classes have no weight, so this is the gradient of the true class alone.
    assert mine.item() == pytest.approx(-rest.item(), rel=5e-3)


@pytest.mark.parametrize("size", [1e3, 1e4, 1e5])
def test_large_logits_cost_a_unit_in_their_last_place(size):
    hidden, weight = torch.full((64, 1), size), torch.tensor([[1.0], [0.99999], [0.9999], [-1.0]])
    weight = weight + torch.rand(4, 1, generator=torch.Generator().manual_seed(0)) * 1e-4
    target = torch.arange(64) % 3
    losses = fused(hidden, weight, target, reduction="none")
    right = functional.cross_entropy(hidden.double() @ weight.double().t(), target, reduction="none")
    place = torch.finfo(torch.float32).eps * 2.0 ** math.floor(math.log2(size))
    assert (losses.double() - right).abs().max() <= 2 * place


def test_small_gradients_in_fp16_outlive_the_mean():
    hidden, weight, target, _ = head(4096, 4, 8, torch.float16)
    exact = wide((hidden, weight))
    scale = 65536.0  # of a gradient scaler
    (right,) = torch.autograd.grad(OP.reference(*exact, target) * scale, exact[0])
    (mine,) = torch.autograd.grad(fused(hidden, weight, target) * scale, hidden)
    assert error(mine, right) < 2e-3


@pytest.mark.parametrize(("name", "config"), FORWARDS, ids=lambda v: str(v))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_large_gradients_in_fp16_are_held_until_they_are_divided(name, config, reduction):
    tokens = 4096
    hidden = (torch.randn(tokens, 16) + 30).half().requires_grad_()
    weight = (torch.randn(8, 16) / 10).half().requires_grad_()
    target = torch.zeros(tokens, dtype=torch.int64)
    bias = torch.zeros(8, dtype=torch.float16, requires_grad=True)
    config = {**config, "sums": "float32"} if "sums" in config else config
    given = {"implementation": name, "config": config or None, "reduction": reduction}

    def divided(*inputs, **options):
        return fused(*inputs, **options) / (tokens if reduction == "sum" else 1)

    mine = gradients(divided(hidden, weight, target, bias, **given), (hidden, weight, bias))
    exact = wide((hidden, weight, bias))
    right = gradients(OP.reference(exact[0], exact[1], target, exact[2]), exact)
    assert right[1].abs().max() * tokens > 65504  # more than fp16 holds, before it is divided
    assert all(value.isfinite().all() and value.dtype == torch.float16 for value in mine)
    assert all(error(value, true) < 2e-3 for value, true in zip(mine, right, strict=True))


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_count_is_zero(tokens, mode, reduction):
    hidden, weight, target, _ = head(tokens, 4, 9)
    target.fill_(-100)
    for name, _ in FORWARDS[::2]:
        loss = fused(hidden, weight, target, compact=mode, reduction=reduction, implementation=name)
        assert loss.item() == 0.0
        assert all((g == 0).all() for g in gradients(loss, (hidden, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"lse_square_scale": 0.1}])
@pytest.mark.parametrize("what", ["num_items", "class_weight"])
def test_a_mean_that_divides_by_nothing_is_zero_as_that_of_cross_entropy(what, options, dtype):
    hidden, weight, target, _ = head(150, 4, 9, dtype)
    zeros = {"num_items": torch.tensor(0), "class_weight": torch.zeros(9)}[what]
    given = (zeros, None) if what == "class_weight" else (None, zeros)
    exact = wide((hidden, weight))
    right = registry.get("cross_entropy")(functional.linear(*exact), target, *given, **options)
    wanted = gradients(right, exact)
    # The square's mean is over the tokens that count, whatever the weights are.
    assert bool(right) is ("lse_square_scale" in options and what == "class_weight")
    formula = OP.reference(*exact, target, None, *given, **options)
    assert formula.item() == pytest.approx(right.item())
    for mine, true in zip(gradients(formula, exact), wanted, strict=True):
        torch.testing.assert_close(mine, true)
    for name, config in FORWARDS:
        config = {**config, "sums": "float32"} if "sums" in config and dtype == torch.float16 else config
        loss = fused(hidden, weight, target, None, *given, implementation=name, config=config or None, **options)
        assert loss.item() == pytest.approx(right.item(), rel=1e-2)
        for mine, true in zip(gradients(loss, (hidden, weight)), wanted, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=2e-2, atol=1e-3 if right else 0)


def test_a_target_out_of_range_is_no_number():
    hidden, weight, target, _ = head(8, 4, 9)
    for wrong in (9, -1, 2**40):
        target[2] = wrong
        loss = fused(hidden, weight, target)
        assert loss.isnan()
        assert gradients(loss, (hidden, weight))[0][2].isnan().all()
        with pytest.raises(InvalidInputError, match=str(wrong)):
            OP.check_values((hidden, weight, target, None, None, None), OP.bind((hidden, weight, target), {})[1])


def test_num_items_is_what_the_mean_divides_by():
    inputs = head(30, 4, 9)
    total = fused(*inputs, reduction="sum")
    for items in (torch.tensor(7), torch.tensor(7.0)):
        assert fused(*inputs, None, items).item() == pytest.approx(total.item() / 7)
    with pytest.raises(InvalidInputError, match="only a mean"):
        fused(*inputs, None, torch.tensor(7), reduction="sum")


def test_an_ignored_class_may_be_a_real_one():
    hidden, weight, target, _ = head(30, 4, 9)
    target.clamp_(min=0)
    right = functional.cross_entropy(hidden @ weight.t(), target, ignore_index=0)
    for mode in ("on", "off"):
        torch.testing.assert_close(fused(hidden, weight, target, ignore_index=0, compact=mode), right)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": torch.ones(9, 5)}, "weight must have shape"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "one int64 class a row"),
        ({"target": torch.zeros(8, dtype=torch.int32)}, "one int64 class a row"),
        ({"bias": torch.ones(8)}, "bias must have shape"),
        ({"class_weight": torch.ones(8)}, "one weight a class"),
        ({"num_items": torch.ones(2)}, "one number"),
        ({"label_smoothing": 1.5}, "part of the loss"),
    ],
)
def test_what_does_not_fit_is_refused(change, match):
    hidden, weight, target, _ = head(8, 4, 9)
    with pytest.raises(InvalidInputError, match=match):
        fused(**{"hidden": hidden, "weight": weight, "target": target, **change})


def test_mixed_dtypes_are_refused_and_autocast_mends_them():
    hidden, weight, target, _ = head(8, 4, 9)
    with pytest.raises(UnsupportedDtypeError, match="one dtype"):
        fused(hidden.bfloat16(), weight, target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused(hidden.bfloat16(), weight, target)
    loss.backward()
    assert loss.dtype == weight.grad.dtype == torch.float32


def test_rows_that_count():
    target = torch.tensor([-100, 3, -100, 5])
    assert compact(target, -100, "on", 1).tolist() == compact(target, -100, "auto", 1).tolist() == [1, 3]
    assert compact(target, -100, "off", 1) is None
    assert compact(target, 7, "on", 1) is None
    mostly = torch.arange(100)
    assert compact(mostly, 5, "auto", 1) is None
    assert compact(mostly, 5, "on", 1).numel() == 99


# --- keys and memory --------------------------------------------------------------------------------------------------


def test_an_example_of_a_problem_is_that_problem():
    for dtype in ("bfloat16", "float32", "float16", "float64"):
        for description in OP.odd(dtype):
            for scheme in OP.schemes:
                if description.flags["per_token"] and scheme.gradients:
                    continue
                needs = (True, True, description.dtypes["bias"] != "none")
                for phase in (FORWARD, BACKWARD):
                    bare = OP.problem(description, phase, scheme.name, needs)
                    assert OP.has(OP.problem(description, phase, scheme.name, needs, OP.budget(bare)))


@pytest.mark.parametrize(
    "sizes",
    [
        (512, 64, 517),
        (1024, 64, 50257),
        pytest.param((8192, 4096, 128256), marks=pytest.mark.ci),
        pytest.param((16384, 1024, 151936), marks=pytest.mark.slow),
    ],
)
def test_memory_is_what_is_declared_and_within_the_budget(sizes):
    for item in registry.catalog.implementations(NAME):
        if item.capability.vendor != "any" or item.name == "single":
            continue
        needs, description = (True, True, False), contract.described(sizes, "bfloat16")
        budget = OP.budget(OP.problem(description, item.phase, item.scheme, needs))
        assert budget == budget_class(budget)
        problem = OP.problem(description, item.phase, item.scheme, needs, budget)
        config = item.heuristic(problem, CPU) if item.name != "scale" else Config()
        assert item.why_illegal(config, problem, CPU) is None or item.name == "chunked"
        if item.why_illegal(config, problem, CPU, budget):
            assert item.name != "scale", "whatever forward did, backward has to be possible"
            continue
        tensors = Arguments.of(OP, problem, torch.device("meta")).tensors
        call = item.bind(config, CPU, OP.options_of(problem), OP.needs_of(problem), problem)
        with torch.no_grad(), Live() as live:
            results = call(*tensors)
        given = {t.untyped_storage()._cdata for t in tensors if t is not None}
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in results if t is not None}
        extra = live.peak - sum(size for key, size in made.items() if key not in given)
        assert 0 < extra <= item.extra_bytes(problem, config) <= budget, item.name


def usual(tokens, hidden, vocab, budget=None, trace=None):
    """What an untuned call takes, and its problem."""
    description = contract.described((tokens, hidden, vocab), "bfloat16")
    bare = OP.problem(description, FORWARD, "grad_in_forward", (True, True, False))
    budget = OP.budget(bare) if budget is None else budget
    problem = OP.problem(description, FORWARD, "grad_in_forward", (True, True, False), budget)
    return registry.dispatcher.decide(problem, CPU, registry.terms(budget=budget), trace), problem


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((2048, 4096, 128256), 2048),
        ((8192, 4096, 128256), 2048),
        ((16384, 4096, 128256), 4096),
        ((8192, 2048, 151936), 2048),
        ((16384, 2048, 151936), 4096),
        ((8192, 4096, 32000), 8192),
        ((32768, 4096, 32000), 8192),
        ((32768, 4096, 50257), 8192),
        ((131072, 4096, 50257), 32768),
        ((131072, 4096, 16384), 32768),
    ],
)
def test_the_usual_slabs(sizes, rows):
    decision, _ = usual(*sizes)
    if rows == sizes[0]:
        assert decision.implementation.name == "single"
    else:
        assert decision.implementation.name == "chunked"
        assert decision.config == Config(slab_rows=rows, sums="input")


def test_one_slab_of_more_than_is_usual_is_legal_but_has_to_be_measured():
    trace = []
    _, problem = usual(131072, 4096, 16384, trace=trace)
    (told,) = [c for c in trace if c.choice.startswith("any:single")]
    assert not told.accepted
    assert "to be measured" in told.reason
    found = candidates(registry.catalog, problem, CPU)
    assert "single" in [c.implementation.name for c in found.legal]
    assert found.default.implementation.name == "chunked"
    # A larger budget was given to be used.
    assert usual(131072, 4096, 16384, 16 << 30)[0].implementation.name == "single"


# --- both faces -------------------------------------------------------------------------------------------------------


def test_opcheck():
    hidden, weight, target, _ = head(6, 4, 9)
    options = [*(o.default for o in OP.options)]
    names = [o.name for o in OP.options]
    options[names.index("compact")] = "off"
    torch.library.opcheck(
        torch.ops.liger_registry.fused_linear_cross_entropy_forward.default,
        (hidden, weight, target, None, None, None, *options, [True, True, False, False, False, False], ""),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.ci
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    inputs = head((2, 8), 4, 19)
    handle = registry.get(NAME)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, weight, target):
        return handle(hidden, weight, target, reduction=reduction).sum()

    loss = step(*inputs[:3])
    right = OP.reference(*inputs, reduction=reduction).sum()
    torch.testing.assert_close(loss, right)
    for mine, theirs in zip(gradients(loss, inputs), gradients(right, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
