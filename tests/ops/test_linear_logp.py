"""The contract of linear_logp, its slabs, its memory, and both faces of a call."""

from __future__ import annotations

import math

import pytest
import torch
from linear_losses import Live, error, head, wide
from torch.nn import functional

from liger_registry import registry
from liger_registry.device import Device
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.kernels import linear_products, linear_slabs
from liger_registry.kernels.linear_heuristics import VOCAB_SLABS, slab_columns
from liger_registry.kernels.linear_products import add_blocks, add_product
from liger_registry.ops import linear_logp as contract
from liger_registry.ops.linear_logp import OP
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.tuning.arguments import Arguments

CPU = Device.parse("cpu")
EVERYTHING = {
    "softcap": 5.0,
    "scale": 0.7,
    "return_logsumexp": True,
    "return_entropy": True,
    "return_argmax": True,
}
FORWARDS = [("row_slabs", {"slab_rows": 128}), ("vocab_slabs", {"slabs": 1}), ("vocab_slabs", {"slabs": 8})]


def logp(*inputs, implementation=None, config=None, **options):
    pins = None if implementation is None else {"forward": implementation}
    return registry.get("linear_logp", implementation=pins, config=config)(*inputs, **options)


def gradients(outputs, upstream, inputs):
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return torch.autograd.grad(outputs, wanted, upstream)


def test_the_formula_is_torchs():
    hidden, weight, target, bias = head((3, 7), 8, 19, torch.float64, bias=True)
    found, lse, entropy, argmax = OP.reference(
        hidden, weight, target, bias, return_logsumexp=True, return_entropy=True, return_argmax=True
    )
    logits = functional.linear(hidden, weight, bias)
    counted = target != -100
    right = torch.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    torch.testing.assert_close(found, right.where(counted, 0.0))
    torch.testing.assert_close(lse, logits.logsumexp(-1).where(counted, 0.0))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy().where(counted, 0.0))
    assert torch.equal(argmax, logits.argmax(-1).where(counted, -1))


def test_values_by_hand():
    hidden, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    found, lse, entropy, argmax = logp(
        hidden,
        weight,
        torch.tensor([1, 0, -100]),
        return_logsumexp=True,
        return_entropy=True,
        return_argmax=True,
    )
    assert found.tolist() == pytest.approx([math.log(0.75), math.log(0.1), 0.0])
    assert lse.tolist() == pytest.approx([math.log(4.0), math.log(10.0), 0.0])
    expected = [-sum(p * math.log(p) for p in (q, 1 - q)) for q in (0.25, 0.1)]
    assert entropy.tolist() == pytest.approx([*expected, 0.0])
    assert argmax.tolist() == [1, 1, -1]


def test_gradcheck():
    hidden, weight, target, bias = head(5, 3, 7, torch.float64, bias=True)
    for function in (OP.reference, logp):
        assert torch.autograd.gradcheck(
            lambda h, w, b, f=function: f(
                h, w, target, b, softcap=3.0, scale=0.7, return_logsumexp=True, return_entropy=True
            ),
            (hidden, weight, bias),
        )


@pytest.mark.parametrize(("name", "config"), FORWARDS, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_every_implementation_gives_the_references_numbers(name, config, options, mode):
    inputs = head((2, 150), 16, 517, bias=True)
    found = logp(*inputs, implementation=name, config=config, compact=mode, **options)
    right = OP.reference(*(exact := wide(inputs)), **options)
    found, right = (r if isinstance(r, tuple) else (r,) for r in (found, right))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=2e-6)
    floats = [n for n, y in enumerate(found) if y.is_floating_point()]
    upstream = [torch.randn(2, 150) for _ in floats]
    ours = gradients([found[n] for n in floats], upstream, inputs)
    theirs = gradients([right[n] for n in floats], [u.double() for u in upstream], exact)
    assert all(error(a, b) < 2e-6 for a, b in zip(ours, theirs, strict=True))
    assert (ours[0][inputs[2] == -100] == 0).all()


@pytest.mark.parametrize("needed", range(1, 8))
def test_only_what_is_needed_is_computed(needed):
    inputs = head(40, 8, 61, bias=True)
    needs = [bool(needed & 1 << n) for n in range(3)]
    for number, need in zip((0, 1, 3), needs, strict=True):
        inputs[number].requires_grad_(need)
    upstream = torch.randn(40)
    logp(*inputs).backward(upstream)
    exact = wide(inputs)
    OP.reference(*exact).backward(upstream.double())
    for number, need in zip((0, 1, 3), needs, strict=True):
        assert (inputs[number].grad is not None) is need
        assert not need or error(inputs[number].grad, exact[number].grad) < 1e-6


def test_each_slab_of_the_heads_gradient_is_rounded_once():
    inputs = head(600, 64, 2000, torch.bfloat16)
    exact = wide(inputs)
    upstream = torch.randn(600)
    (right,) = torch.autograd.grad(OP.reference(*exact), exact[1], upstream.double())
    (eager,) = torch.autograd.grad(OP.reference(*inputs), inputs[1], upstream)
    (mine,) = torch.autograd.grad(logp(*inputs), inputs[1], upstream)
    assert error(mine, right) <= 1.05 * error(eager, right)


def test_a_confident_token_keeps_its_logp_and_gradient():
    weight = torch.tensor([[0.0], [1.0]])
    hidden = torch.tensor([[20.0], [40.0], [80.0]]).requires_grad_()
    found = logp(hidden, weight, torch.ones(3, dtype=torch.int64))
    assert found.tolist() == pytest.approx([-math.exp(-g) for g in (20.0, 40.0, 80.0)], rel=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    assert gradient.flatten().tolist() == pytest.approx([math.exp(-g) for g in (20.0, 40.0, 80.0)], rel=1e-5)


def test_ignored_tokens_with_huge_logits_have_no_gradient():
    hidden, weight, target, _ = head(10, 4, 9)
    with torch.no_grad():
        hidden[target == -100] *= 1e4
    for options in ({}, EVERYTHING):
        found = logp(hidden, weight, target, compact="off", **options)
        found = (found if isinstance(found, tuple) else (found,))[:3]
        grads = gradients(found, [torch.ones_like(y) for y in found], (hidden, weight))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][target == -100] == 0).all()


def test_a_target_out_of_range_is_no_number():
    hidden, weight, target, _ = head(8, 4, 9)
    target[2] = 9
    found = logp(hidden, weight, target)
    assert found.isnan().tolist() == [n == 2 for n in range(8)]
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    assert gradient.isnan().all(-1).tolist() == [n == 2 for n in range(8)]
    with pytest.raises(InvalidInputError, match="holds 9"):
        OP.check_values((hidden, weight, target, None), OP.bind((hidden, weight, target), {})[1])


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_to_count_is_zero(tokens, mode):
    hidden, weight, target, _ = head(tokens, 4, 9)
    target.fill_(-100)
    for name, config in FORWARDS:
        found = logp(hidden, weight, target, compact=mode, implementation=name, config=config)
        assert (found == 0).all()
        assert all((g == 0).all() for g in gradients(found, torch.ones(tokens), (hidden, weight)))


def test_what_does_not_fit_is_refused():
    hidden, weight, target, _ = head(8, 4, 9)
    with pytest.raises(InvalidInputError, match="weight must have shape"):
        logp(hidden, weight.t(), target)
    with pytest.raises(InvalidInputError, match="one int64 class a row"):
        logp(hidden, weight, target[:4])
    with pytest.raises(UnsupportedDtypeError, match="one dtype"):
        logp(hidden, weight.bfloat16(), target)


def test_inputs_of_any_layout_are_read_and_not_written():
    hidden, weight, target, _ = head((4, 6), 8, 19)
    right = OP.reference(hidden, weight, target)
    given = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1)[:, :5]
    before = given.clone()
    found = logp(given, weight.detach().t().contiguous().t(), target[:, :5])
    torch.testing.assert_close(found, right[:, :5].detach())
    assert torch.equal(given, before)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_products_of_blocks(monkeypatch, first, turned):
    monkeypatch.setattr("liger_registry.kernels.linear_products.BLOCK", 7)
    left, right = torch.randn(20, 15).bfloat16(), torch.randn(15, 23).bfloat16()
    if turned:
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    for dtype in (torch.bfloat16, torch.float32):
        total = torch.randn(20, 23).to(dtype)
        exact = (left.double() @ right.double()) + (0.0 if first else total.double())
        add_blocks(total, left, right, None if first else total)
        assert error(total, exact) < (3e-3 if dtype == torch.bfloat16 else 1e-6)
    total = torch.empty(20, 23)
    add_product(total, left.float(), right.float(), True)
    assert error(total, left.double() @ right.double()) < 1e-6


@pytest.fixture
def products_of_a_gpu(monkeypatch):
    """Products of 16 bits with fp32 results, which PyTorch has on NVIDIA's GPUs alone."""
    plain = torch.mm

    def product(left, right, *, out_dtype=None, out=None):
        if out_dtype is None:
            return plain(left, right, out=out)
        assert (out_dtype, left.dtype) == (torch.float32, torch.bfloat16)
        found = plain(left.float(), right.float())
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(linear_products, "in_blocks", lambda operand: False)
    monkeypatch.setattr(linear_products, "_widens", lambda tensor: True)


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("vocab", [1, 61, 150])
def test_a_bias_is_added_before_the_only_rounding(monkeypatch, products_of_a_gpu, rows, vocab):
    monkeypatch.setattr(linear_products, "_WIDE_BYTES", 1)  # 64 columns at once
    inputs = [(torch.randn(shape) * 8).round() / 8 for shape in ((rows, 24), (vocab, 24), (vocab,))]
    hidden, weight, bias = (t.bfloat16() for t in inputs)
    right = hidden.double() @ weight.double().t() + bias.double()  # exact in fp32 too
    slab = torch.full((rows, 192), 7.0).bfloat16()
    linear_products.logits_into(slab[:, :vocab], hidden, weight, bias)
    assert torch.equal(slab[:, :vocab], right.bfloat16())
    assert (slab[:, vocab:] == 7).all()
    if rows * vocab > 1000:
        assert not torch.equal((hidden.double() @ weight.double().t()).bfloat16() + bias, right.bfloat16())


@pytest.mark.parametrize("first", [True, False])
def test_a_wider_sum_where_products_do_not_add_to_one(monkeypatch, products_of_a_gpu, first):
    monkeypatch.setattr(linear_products, "_ADDS_WIDER", False)
    monkeypatch.setattr(linear_products, "ADDED_ROWS", 8)
    left, right, total = torch.randn(21, 15).bfloat16(), torch.randn(15, 23).bfloat16(), torch.randn(21, 23)
    exact = left.double() @ right.double() + (0.0 if first else total.double())
    add_product(total, left, right, first)
    assert error(total, exact) < 1e-6


@pytest.mark.parametrize("name", ["linear_logp", "fused_linear_cross_entropy"])
def test_logits_that_backward_rounds_another_way_give_no_infinity(monkeypatch, name):
    """A product of another shape may be off by a rounding: 128 for 20,000 in bf16, and exp(128) is no number."""
    hidden = torch.tensor([[2.0], [-2.0], [1.0]]).bfloat16().requires_grad_()
    weight = torch.tensor([[1e4], [1e4], [-1e4], [0.5], [-1e4]]).bfloat16().requires_grad_()
    target = torch.tensor([1, 0, 4])
    options = {} if name == "linear_logp" else {"reduction": "none"}
    pins = {"forward": "row_slabs", "backward": "vocab_slabs"}
    handle = registry.get(name, implementation=pins)
    right = torch.autograd.grad(handle(hidden, weight, target, **options).sum(), (hidden, weight))

    def up(slab, *operands):
        plain(slab, *operands)
        slab.copy_((slab.contiguous().view(torch.int16) + (slab != 0)).view(torch.bfloat16))  # away from 0

    found = handle(hidden, weight, target, **options)
    plain = linear_slabs.logits_into
    monkeypatch.setattr(linear_slabs, "logits_into", up)
    mine = torch.autograd.grad(found.sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in (*right, *mine))
    for ours, theirs in zip(mine, right, strict=True):
        assert error(ours, theirs) <= 1.0


@pytest.mark.parametrize(
    ("held", "dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, torch.float32)],
    ids=str,
)
def test_gradients_are_scaled_in_pieces_and_in_their_own_memory(monkeypatch, held, dtype):
    gradient, factor = torch.randn(300, 41).to(held), torch.tensor(1 / 3)
    right = (gradient.double() * factor.double()).to(dtype)
    monkeypatch.setattr(linear_products, "SCALED", 1000)
    with Live() as live:
        found = linear_products.scaled(gradient, factor, dtype)
    assert (found.data_ptr() == gradient.data_ptr()) == (held == dtype)
    torch.testing.assert_close(found, right, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0)
    own = 0 if held == dtype else right.nbytes
    assert live.peak - own <= 2 * 4 * 1000


def test_slabs_of_a_vocabulary_cover_it():
    for vocab in (1, 2, 61, 517, 32000, 50257, 128256, 151936):
        for slabs in VOCAB_SLABS:
            columns = slab_columns(vocab, slabs)
            assert 1 <= -(-vocab // columns) <= slabs
            assert columns % 128 == 0 or columns < 1024 or columns == vocab


# --- keys, memory, faces ----------------------------------------------------------------------------------------------


def test_an_example_of_a_problem_is_that_problem():
    for dtype in ("bfloat16", "float32", "float16", "float64"):
        for description in OP.odd(dtype):
            needs = (True, True, description.dtypes["bias"] != "none")
            for phase in (FORWARD, BACKWARD):
                bare = OP.problem(description, phase, "recompute", needs)
                assert OP.has(OP.problem(description, phase, "recompute", needs, OP.budget(bare)))


@pytest.mark.parametrize("sizes", [(1024, 64, 50257), pytest.param((8192, 4096, 128256), marks=pytest.mark.ci)])
def test_memory_is_what_is_declared_and_within_the_budget(sizes):
    needs, description = (True, True, False), contract.described(sizes, "bfloat16", entropy=True, argmax=True)
    for item in registry.catalog.implementations("linear_logp"):
        budget = OP.budget(OP.problem(description, item.phase, item.scheme, needs))
        problem = OP.problem(description, item.phase, item.scheme, needs, budget)
        config = item.heuristic(problem, CPU)
        assert item.why_illegal(config, problem, CPU, budget) is None
        tensors = Arguments.of(OP, problem, torch.device("meta")).tensors
        call = item.bind(config, CPU, OP.options_of(problem), OP.needs_of(problem), problem)
        with torch.no_grad(), Live() as live:
            results = call(*tensors)
        made = sum(t.untyped_storage().nbytes() for t in results if t is not None)
        assert 0 < live.peak - made <= item.extra_bytes(problem, config) <= budget, item.name


@pytest.mark.ci
def test_compiled():
    inputs = head((2, 8), 4, 19)
    handle = registry.get("linear_logp")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, weight, target):
        found, entropy = handle(hidden, weight, target, return_entropy=True)
        return found.sum() + 0.5 * entropy.sum()

    def right(hidden, weight, target):
        found, entropy = OP.reference(hidden, weight, target, return_entropy=True)
        return found.sum() + 0.5 * entropy.sum()

    mine, theirs = step(*inputs[:3]), right(*inputs[:3])
    torch.testing.assert_close(mine, theirs)
    for a, b in zip(gradients(mine, None, inputs), gradients(theirs, None, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
