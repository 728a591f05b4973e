"""The contract of cross_entropy against torch's, by hand and by every option; keys, errors, both faces of the call."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_registry import registry
from liger_registry.architecture import Architecture
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.ops.cross_entropy import OP, REDUCTIONS
from liger_registry.problem import BACKWARD, FORWARD

IMPLEMENTATIONS = ["eager", "functional"]
INF, NAN = float("inf"), float("nan")


def call(implementation, *inputs, **options):
    return registry.get("cross_entropy", implementation=implementation)(*inputs, **options)


def made(rows=7, vocab=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), generator=generator)
    target[1::4] = -100
    weight = torch.rand(vocab, generator=generator).to(torch.promote_types(dtype, torch.float32)) + 0.5
    return logits, target, weight


@pytest.mark.parametrize(("reduction", "smoothing"), list(itertools.product(REDUCTIONS, (0.0, 0.3))))
@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_values_and_gradients_are_torchs(implementation, reduction, smoothing):
    logits, target, weight = made()
    for classes in (None, weight):
        ours = call(implementation, logits, target, classes, label_smoothing=smoothing, reduction=reduction)
        right = F.cross_entropy(logits, target, classes, label_smoothing=smoothing, reduction=reduction)
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
        upstream = torch.randn_like(right)
        (got,), (wanted,) = (torch.autograd.grad(y, logits, upstream) for y in (ours, right))
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_z_loss_softcap_accuracy_and_predictions_are_their_formulas(implementation):
    logits, target, weight = made()
    for reduction in REDUCTIONS:
        loss, z_loss, accuracy, tokens = call(
            implementation, logits, target, weight, reduction=reduction, lse_square_scale=0.02, softcap=4.0,
            return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
        )  # fmt: skip
        z, counted = 4 * torch.tanh(logits / 4), target != -100
        squares = 0.02 * z.logsumexp(-1).square() * counted
        guess = torch.where(counted, logits.argmax(-1), -1)
        right = ((guess == target) & counted).double()
        main = F.cross_entropy(z, target, weight, reduction=reduction)
        if reduction == "none":
            shares = squares, right
        elif reduction == "sum":
            shares = squares.sum(), right.sum() / counted.sum()
        else:
            shares = squares.sum() / counted.sum(), right.sum() / counted.sum()
        torch.testing.assert_close(loss, main + shares[0])
        torch.testing.assert_close(z_loss, shares[0].detach())
        torch.testing.assert_close(accuracy, shares[1])
        assert torch.equal(tokens, guess)
        assert not any(t.requires_grad for t in (z_loss, accuracy, tokens))
        upstream = torch.randn_like(loss)
        (got,) = torch.autograd.grad(loss, logits, upstream)
        (wanted,) = torch.autograd.grad(main + shares[0], logits, upstream)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_num_items_replaces_every_denominator(implementation):
    logits, target, weight = made()
    for items in (torch.tensor(5), torch.tensor([5.0]), torch.tensor(5, dtype=torch.int32)):
        options = {"lse_square_scale": 0.1, "return_token_accuracy": True}
        loss, accuracy = call(implementation, logits, target, weight, items, **options)
        total, _ = call(implementation, logits, target, weight, reduction="sum", **options)
        torch.testing.assert_close(loss, total / 5)
        right = (logits.argmax(-1) == target).sum() / 5
        torch.testing.assert_close(accuracy, right.double())
        (got,), (wanted,) = (torch.autograd.grad(y, logits, retain_graph=True) for y in (loss, total / 5))
        torch.testing.assert_close(got, wanted)


def test_gradcheck_in_float64_with_every_option():
    logits, target, weight = made(4, 5)
    for reduction, smoothing, square, cap in (
        ("mean", 0.0, 0.0, 0.0), ("none", 0.2, 0.0, 2.0), ("sum", 0.0, 0.1, 2.0), ("mean", 0.2, 0.1, 0.0),
    ):  # fmt: skip

        def loss(x, options=(smoothing, square, cap, reduction)):
            return OP.reference(x, target, weight, None, -100, *options)

        assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_confident_rows_keep_their_gradient(implementation, dtype):
    for share in (0.9, 0.99, 0.999):
        logits = torch.zeros(1, 32000, dtype=dtype)
        logits[0, 7] = math.log(share / (1 - share) * 31999)
        logits.requires_grad_()
        p = torch.softmax(logits.detach().double(), -1)[0, 7]
        (gradient,) = torch.autograd.grad(call(implementation, logits, torch.tensor([7])), logits)
        assert abs(float(gradient[0, 7]) / float(p - 1) - 1) < 0.005


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_logits_stay_finite(implementation):
    logits = torch.zeros(5, 4)
    logits[0, :2] = -INF
    logits[1] = torch.tensor([-100.0, 0.0, 100.0, 200.0])
    logits[2] = torch.tensor([1e30, 0.0, 0.0, 0.0])
    logits[3] = torch.tensor([5.0, -INF, -INF, -INF])  # the target has it all
    logits[4, 3] = -INF
    logits.requires_grad_()
    target = torch.tensor([2, 0, 0, 0, 1])
    loss = call(implementation, logits, target, reduction="none")
    torch.testing.assert_close(loss.detach(), torch.tensor([math.log(2), 300.0, 0.0, 0.0, math.log(3)]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[0, :2] == 0).all()
    assert (gradient[3] == 0).all()
    assert gradient[4, 3] == 0


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_nothing_to_count_is_no_loss(implementation):
    for rows, reduction in itertools.product((0, 3), REDUCTIONS):
        logits = torch.full((rows, 4), NAN).requires_grad_()  # rows that are not counted are not read
        target = torch.full((rows,), -100)
        for extra in ({}, {"label_smoothing": 0.1, "lse_square_scale": 0.1, "return_token_accuracy": True}):
            found = call(implementation, logits, target, torch.ones(4), reduction=reduction, **extra)
            loss = found[0] if extra else found
            assert all((y == 0).all() for y in (found if extra else (found,)))
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            assert (gradient == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_target_that_is_no_class_is_nan_and_its_neighbours_are_not(implementation):
    logits, target, weight = made(6, 5, torch.float32)
    bad = target.clone()
    bad[0], bad[4] = 5, -1
    loss = call(implementation, logits, bad, weight, reduction="none")
    right = call(implementation, logits, target, weight, reduction="none")
    assert loss.isnan().tolist() == [True, False, False, False, True, False]
    assert torch.equal(loss[[1, 2, 3, 5]], right[[1, 2, 3, 5]])
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isnan().all(-1).tolist() == [True, False, False, False, True, False]
    assert call(implementation, logits, bad).isnan()


def test_values_are_checked_by_name_and_place():
    logits, target, _ = made(6, 5)
    OP.check_values((logits, target, None, None), {"ignore_index": -100})
    target[3] = 9
    with pytest.raises(InvalidInputError, match=r"(?s)target\[3\] of cross_entropy is 9.*0 to 4"):
        OP.check_values((logits, target, None, None), {"ignore_index": -100})
    twice = target.view(2, 3)
    with pytest.raises(InvalidInputError, match=r"target\[1, 0\]"):
        OP.check_values((logits.view(2, 3, 5), twice, None, None), {"ignore_index": -100})
    OP.check_values((logits, torch.where(target == 9, 0, target).clamp_min(0), None, None), {"ignore_index": -1})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes_views_and_memory(implementation):
    base = torch.randn(2, 5, 12, dtype=torch.bfloat16)
    labels = torch.randint(12, (5, 2)).t()  # not contiguous
    logits = base.clone().requires_grad_()
    shifted = logits[:, :-1]
    for options in ({}, {"in_place": True}):
        loss = call(implementation, shifted, labels[:, 1:], **options)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(
            loss, F.cross_entropy(shifted.float().flatten(0, 1), labels[:, 1:].flatten()), rtol=1e-5, atol=1e-5
        )
        assert torch.equal(logits.detach(), base)
    rows = call(implementation, shifted, labels[:, 1:], reduction="none")
    assert rows.shape == (2, 4)
    (gradient,) = torch.autograd.grad(rows.sum(), logits)
    assert (gradient[:, -1] == 0).all()
    one = call(implementation, logits[0, 0], labels[0, 0], reduction="none")
    assert one.shape == ()


def test_in_place_writes_the_gradient_into_the_logits_and_nothing_else_does():
    from liger_registry import Device
    from liger_registry.portable import cross_entropy

    logits, target, _ = made(4, 6, torch.float32)
    options = {o.name: o.default for o in OP.options}
    for memory, in_place in ((logits.detach().clone(), True), (torch.randn(1, 6).expand(4, 6), False)):
        given = {**options, "in_place": True}
        saved = OP.schemes[0].reference(memory, target, None, None, **given)[4:]
        before = memory.clone()
        (gradient,) = cross_entropy.backward_eager(
            torch.ones(()), None, None, None, memory, target, None, None, *saved,
            device=Device.parse("cpu"), needs=(True,), **given,
        )  # fmt: skip
        assert (gradient.data_ptr() == memory.data_ptr()) is in_place
        assert torch.equal(memory, before) is not in_place


def test_two_losses_and_two_backwards_on_one_tensor():
    logits, target, _ = made(5, 6, torch.float32)
    first = call(None, logits, target, label_smoothing=0.1)
    second = call(None, logits, target, reduction="sum")
    before = logits.detach().clone()
    gradients = [torch.autograd.grad(first, logits, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*gradients)
    torch.autograd.grad(second, logits)
    assert torch.equal(logits.detach(), before)


@settings(max_examples=50)
@given(
    st.integers(0, 60), st.integers(1, 40), st.sampled_from(["float32", "bfloat16", "float64"]),
    st.sampled_from([FORWARD, BACKWARD]), st.integers(0, 30),
)  # fmt: skip
def test_an_example_of_a_problem_is_that_problem(rows, vocab, dtype, phase, which):
    descriptions = list(OP.odd(dtype))
    description = descriptions[which % len(descriptions)]
    dims = description.dims.having(rows=rows, vocab=vocab)
    problem = OP.problem(type(description)(dims, description.dtypes, description.flags), phase, "default", (True,))
    assert OP.has(problem)
    options = OP.options_of(problem)
    inputs = OP.example(problem, "cpu", 3, "tail")
    OP.validate(inputs, options)
    OP.check_values(inputs, options)
    assert OP.problem(OP.describe(inputs, options), phase, "default", (True,)) == problem
    empty, full = (f(*inputs, **options) for f in (OP.schemes[0].allocate, OP.schemes[0].reference))
    for ours, theirs in zip(empty, full, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    wide = tuple(t.double() if t is not None and t.is_floating_point() else t for t in inputs)
    sizes = OP.magnitude(wide, (torch.ones_like(full[0]).double(), None, None, None), options)
    assert sizes["grad_logits"].shape == inputs[0].shape
    assert all(
        sizes[n].shape == t.shape for n, t in zip(OP.outputs, full, strict=False) if n in sizes and t is not None
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_cut_call_adds_up(reduction):
    logits, target, weight = made()
    options = {o.name: o.default for o in OP.options} | {
        "reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 0.2, "return_z_loss": True,
        "return_token_accuracy": True,
    }  # fmt: skip
    whole = OP.schemes[0].reference(logits, target, weight, None, **options)
    inputs, cut = OP.cut((logits, target, weight, None), options)
    parts = [
        OP.schemes[0].reference(logits[span], target[span], *inputs[2:], **cut) for span in (slice(0, 3), slice(3, 7))
    ]
    for name, total, *pieces in zip((*OP.outputs, *OP.schemes[0].saved), whole, *parts, strict=True):
        assert (total is None) == (pieces[0] is None), name
        if total is not None:
            joined = torch.cat(pieces) if total.shape[:1] == (7,) else sum(pieces)
            torch.testing.assert_close(joined, total, rtol=1e-6, atol=1e-7)


def test_what_is_refused():
    logits, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for wrong, message in (
        ((torch.randn(3, 0), target), "vocab >= 1"),
        ((logits, target.int()), r"(?s)int32.*target.long\(\)"),
        ((logits, target[:2]), r"shape \(2,\)"),
        ((torch.randn(2, 4, 3), torch.zeros(2, 3, dtype=torch.int64)), "classes are the last dimension"),
        ((logits, target, torch.ones(3)), "one weight a class"),
        ((logits, target, None, torch.ones(2)), "one element"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call(None, *wrong)
    with pytest.raises(InvalidInputError, match="reduction='mean'"):
        call(None, logits, target, None, torch.ones(()), reduction="sum")
    with pytest.raises(InvalidInputError, match="from 0 to 1"):
        call(None, logits, target, label_smoothing=1.5)
    with pytest.raises(UnsupportedDtypeError, match="cast logits"):
        call(None, logits.int(), target)
    for wrong in ({"reduction": "batchmean"}, {"softcap": -1.0}, {"weight": None}, {"ignore_index": 1.0}):
        with pytest.raises(UnsupportedOptionError):
            call(None, logits, target, **wrong)


def test_every_option_changes_the_result():
    logits, target, _ = made(6, 5, torch.float32)
    plain = call(None, logits, target)
    for options in (
        {"ignore_index": int(target[0])}, {"label_smoothing": 0.1}, {"lse_square_scale": 0.1}, {"softcap": 2.0},
        {"reduction": "sum"},
    ):  # fmt: skip
        known = torch.where(target == -100, 0, target)
        assert not torch.equal(call(None, logits, known, **options), call(None, logits, known)), options
    for option in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"):
        assert len(call(None, logits, target, **{option: True})) == 2
    assert plain.shape == ()


def test_calls_are_what_models_do():
    gemma, qwen = (next(iter(OP.calls(Architecture.preset(n), 512, "bfloat16"))) for n in ("gemma-2-2b", "qwen3-8b"))
    assert dict(gemma.dims.items()) == {"rows": 512, "vocab": 256000}
    assert (gemma.flags["capped"], qwen.flags["capped"]) == (True, False)
    assert OP.has(OP.problem(qwen, FORWARD, "default"))


@pytest.mark.ci
def test_compiled_in_one_graph():
    logits, target, weight = made(5, 6, torch.float32)

    def loss(x):
        return call(None, x * 2, target, weight, label_smoothing=0.1, in_place=True)

    right = loss(logits)
    got = torch.compile(loss, backend="aot_eager", fullgraph=True)(logits)
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(*(torch.autograd.grad(y, logits)[0] for y in (got, right)))
