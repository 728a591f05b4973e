"""Options of the cross-entropies: values and gradients against float64 formulas, and what is returned."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from torch.nn import functional as F

import liger_registry
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.transformers import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
)
from liger_registry.transformers.model.loss_utils import (
    LigerForCausalLMLoss,
    fixed_fused_linear_cross_entropy,
    unpack_cross_entropy_result,
)

TOKENS, HIDDEN, VOCAB = 9, 6, 7


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def head():
    return random(VOCAB, HIDDEN, seed=1).requires_grad_()


@pytest.fixture
def hidden():
    return random(TOKENS, HIDDEN, seed=2).requires_grad_()


@pytest.fixture
def target():
    return torch.tensor([3, -100, 0, 6, 2, 2, -100, 5, 1])


WEIGHTS = random(VOCAB, seed=3).abs() + 0.1


def parts(logits, target, *, weight=None, ignore_index=-100, smoothing=0.0, square=0.0, softcap=None, scaled=False):
    """``(loss, square, weight)`` of each token, in plain torch."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counted = target != ignore_index
    safe = target.where(counted, 0)
    w = torch.ones(VOCAB, dtype=z.dtype) if weight is None else weight
    nll = -z.log_softmax(-1)
    loss = (1 - smoothing) * w[safe] * nll[torch.arange(len(z)), safe] + smoothing / VOCAB * (nll * w).sum(-1)
    squares = square * z.logsumexp(-1).square()
    p = z.softmax(-1).detach()[torch.arange(len(z)), safe] if scaled else 1.0
    return (loss * p).where(counted, 0.0), (squares * p).where(counted, 0.0), w[safe].where(counted, 0.0)


def reduced(values, reduction, items=None):
    loss, squares, weights = values
    if reduction == "none":
        return loss + squares, squares
    loss, squares = loss.sum(), squares.sum()
    if reduction == "mean":
        first, second = (weights.sum(), (weights != 0).sum()) if items is None else (items, items)
        loss, squares = loss / first, squares / second
    return loss + squares, squares


OPTIONS = [
    {},
    {"label_smoothing": 0.2},
    {"lse_square_scale": 1e-2},
    {"softcap": 2.0},
    {"weighted": True},
    {"weighted": True, "label_smoothing": 0.2, "lse_square_scale": 1e-2, "softcap": 2.0, "ignore_index": 2},
]


def formula(logits, target, options, reduction, scaled=False):
    return reduced(
        parts(
            logits,
            target,
            weight=WEIGHTS if options.get("weighted") else None,
            ignore_index=options.get("ignore_index", -100),
            smoothing=options.get("label_smoothing", 0.0),
            square=options.get("lse_square_scale", 0.0),
            softcap=options.get("softcap"),
            scaled=scaled,
        ),
        reduction,
    )


def given(options, name):
    rest = {key: value for key, value in options.items() if key != "weighted"}
    return {**rest, name: WEIGHTS} if options.get("weighted") else rest


def upstream(loss):
    return random(*loss.shape, seed=5).to(loss.dtype)


def usable(target, options):
    return target.where(target >= 0, 2) if "ignore_index" in options else target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy_is_the_formula(options, reduction, target):
    target = usable(target, options)
    logits = random(TOKENS, VOCAB, seed=4).requires_grad_()
    module = LigerCrossEntropyLoss(**given(options, "weight"), reduction=reduction, return_z_loss=True)
    output = module(logits, target)
    loss, squares = formula(logits, target, options, reduction)
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(output.z_loss, squares.detach())
    assert not output.z_loss.requires_grad
    found, expected = (torch.autograd.grad(x, logits, upstream(x))[0] for x in (output.loss, loss))
    torch.testing.assert_close(found, expected)
    functional = liger_cross_entropy(logits, target, **given(options, "weight"), reduction=reduction)
    assert torch.equal(functional, output.loss)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_fused_loss_is_the_formula(options, reduction, scaled, head, hidden, target):
    target = usable(target, options)
    bias = random(VOCAB, seed=6).requires_grad_()
    module = LigerFusedLinearCrossEntropyLoss(
        **given(options, "ce_weight"), reduction=reduction, return_z_loss=True, use_token_scaling=scaled
    )
    output = module(head, hidden, target, bias)
    loss, squares = formula(hidden @ head.T + bias, target, options, reduction, scaled)
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(output.z_loss, squares.detach())
    leaves = head, hidden, bias
    found, expected = (torch.autograd.grad(x, leaves, upstream(x)) for x in (output.loss, loss))
    torch.testing.assert_close(found, expected)
    functional = liger_fused_linear_cross_entropy(
        hidden, head, target, bias, **given(options, "ce_weight"), reduction=reduction, use_token_scaling=scaled
    )
    assert torch.equal(functional, output.loss)


@pytest.mark.parametrize(
    ("scaled", "reduction"), [(None, "mean"), (None, "none"), (False, "mean"), (False, "none"), (True, "none")]
)
@pytest.mark.parametrize("asked", list(itertools.product((False, True), repeat=3)))
def test_what_is_returned_is_what_is_asked_for(asked, reduction, scaled, head, hidden, target):
    names = ("z_loss", "token_accuracy", "predicted_tokens")
    options = {f"return_{name}": value for name, value in zip(names, asked, strict=True)}
    logits = hidden @ head.T
    if scaled is None:
        found = LigerCrossEntropyLoss(reduction=reduction, **options)(logits, target)
    else:
        module = LigerFusedLinearCrossEntropyLoss(reduction=reduction, use_token_scaling=scaled, **options)
        found = module(head, hidden, target)
    if not any(asked):
        assert isinstance(found, torch.Tensor)
        return
    assert isinstance(found, CrossEntropyOutput)
    counted = target != -100
    right = (logits.argmax(-1) == target).to(logits.dtype)
    expected = {
        "z_loss": torch.zeros(TOKENS if reduction == "none" else (), dtype=logits.dtype),
        "token_accuracy": right if reduction == "none" else right.sum() / counted.sum(),
        "predicted_tokens": logits.argmax(-1).where(counted, -1),
    }
    for name, wanted in zip(names, asked, strict=True):
        if wanted:
            torch.testing.assert_close(getattr(found, name), expected[name])
        else:
            assert getattr(found, name) is None


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_count_is_zero(tokens, scaled, head):
    hidden = random(tokens, HIDDEN).requires_grad_()
    target = torch.full((tokens,), -100)
    options = {"use_token_scaling": scaled, "lse_square_scale": 0.1, "return_token_accuracy": True}
    output = LigerFusedLinearCrossEntropyLoss(WEIGHTS, **options)(head, hidden, target)
    output.loss.backward()
    assert output.loss == 0
    assert output.token_accuracy == 0
    assert not head.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_target_that_is_no_class_is_nan(scaled, head, hidden, target):
    target[0] = VOCAB
    assert LigerFusedLinearCrossEntropyLoss(use_token_scaling=scaled)(head, hidden, target).isnan()


def test_the_example_of_the_readme():
    linear = torch.nn.Linear(16, 50, bias=False)
    x, target = torch.randn(12, 16, requires_grad=True), torch.randint(50, (12,))
    loss = LigerFusedLinearCrossEntropyLoss()(linear.weight, x, target)
    loss.backward()
    found = linear.weight.grad, x.grad
    linear.weight.grad = x.grad = None
    F.cross_entropy(linear(x), target).backward()
    torch.testing.assert_close(found, (linear.weight.grad, x.grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_have_the_dtypes_of_liger_kernel(dtype, target):
    logits = random(TOKENS, VOCAB, dtype=dtype)
    output = LigerCrossEntropyLoss(return_z_loss=True, return_token_accuracy=True)(logits, target)
    assert output.loss.dtype == output.z_loss.dtype == F.cross_entropy(logits, target).dtype == dtype
    assert output.token_accuracy.dtype == torch.float32
    head, hidden = random(VOCAB, HIDDEN, dtype=dtype), random(TOKENS, HIDDEN, dtype=dtype)
    assert LigerFusedLinearCrossEntropyLoss()(head, hidden, target).dtype == torch.float32


def test_logits_stay_as_they_are_and_another_loss_can_read_them(target):
    logits = random(TOKENS, VOCAB, seed=4).requires_grad_()
    before = logits.detach().clone()
    loss = LigerCrossEntropyLoss()(logits, target)
    loss.backward(retain_graph=True)
    first = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * first)
    assert torch.equal(logits, before)
    torch.testing.assert_close(LigerCrossEntropyLoss()(logits, target), F.cross_entropy(logits, target))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_the_accumulation_dtype_reaches_the_operation(dtype, target, monkeypatch):
    from liger_registry.transformers import _losses

    seen = []
    real = _losses.call
    monkeypatch.setattr(_losses, "call", lambda *a, **k: (seen.append(k["accumulate"]), real(*a, **k))[1])
    head, hidden = (random(*s, dtype=torch.bfloat16).requires_grad_() for s in ((VOCAB, HIDDEN), (TOKENS, HIDDEN)))
    LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype)(head, hidden, target).backward()
    assert seen == [{None: "auto", torch.float32: "float32", torch.bfloat16: "input"}[dtype]]
    assert head.grad.dtype == torch.bfloat16


def test_under_autocast_the_products_dtype_is_autocasts(target):
    head, hidden = random(VOCAB, HIDDEN, dtype=torch.float32), random(TOKENS, HIDDEN, dtype=torch.float32)
    module = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedOptionError, match="accum_dtype"):
        module(head, hidden, target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(head, hidden, target)
    expected = F.cross_entropy((hidden.bfloat16() @ head.bfloat16().T).float(), target)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"reduction": "batchmean"}, "reduction"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_values_out_of_range_raise_where_the_module_is_made(options, said, hidden, head, target):
    for made in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss):
        with pytest.raises(UnsupportedOptionError, match=said):
            made(**options)
    with pytest.raises(UnsupportedOptionError, match=said):
        liger_cross_entropy(hidden @ head.T, target, **options)
    with pytest.raises(UnsupportedOptionError, match=said):
        liger_fused_linear_cross_entropy(hidden, head, target, **options)


def test_what_is_not_supported_raises(hidden, head, target):
    logits = hidden @ head.T
    for options in ({"size_average": True}, {"reduce": False}):
        with pytest.raises(UnsupportedOptionError, match="reduction"):
            liger_cross_entropy(logits, target, **options)
    with pytest.raises(UnsupportedOptionError, match="LIGER_MEMORY_BUDGET"):
        liger_fused_linear_cross_entropy(hidden, head, target, chunk_mem_const=4)
    with pytest.raises(UnsupportedOptionError, match="accum_dtype"):
        liger_fused_linear_cross_entropy(hidden, head, target, accum_dtype=torch.float16)
    with pytest.raises(UnsupportedOptionError, match="use_token_scaling"):
        LigerFusedLinearCrossEntropyLoss(use_token_scaling="yes")
    with pytest.raises(UnsupportedDtypeError):
        liger_fused_linear_cross_entropy(hidden.float(), head, target)
    with pytest.raises(TypeError):
        LigerCrossEntropyLoss(in_place=True)


def test_class_weights_move_with_the_module_and_are_not_in_its_state(target):
    module = LigerCrossEntropyLoss(WEIGHTS)
    assert not module.state_dict()
    assert module.to(torch.float32).weight.dtype == torch.float32
    assert pickle.loads(pickle.dumps(module)).weight is not None
    assert LigerFusedLinearCrossEntropyLoss(WEIGHTS).to("meta").ce_weight.is_meta


def test_in_place_is_the_registrys(target):
    logits = random(TOKENS, VOCAB, seed=4)
    plain, ours = (logits.clone().requires_grad_() for _ in range(2))
    LigerCrossEntropyLoss()(plain, target).backward()
    liger_registry.get("cross_entropy")(ours, target, in_place=True).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((make, {}) for make in (float, torch.tensor, lambda n: torch.tensor([float(n)]))),
        *((int, options) for options in OPTIONS[:-1]),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_number_of_items_takes_the_place_of_the_count(make, options, scaled, head, hidden, target):
    loss = fixed_fused_linear_cross_entropy(
        hidden,
        head,
        target,
        make(20),
        final_logit_softcapping=options.get("softcap"),
        use_token_scaling=scaled,
        **{key: value for key, value in given(options, "ce_weight").items() if key != "softcap"},
    )
    expected, _ = formula(hidden @ head.T, target, options, "sum", scaled)
    torch.testing.assert_close(loss, expected / 20)
    leaves = head, hidden
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves) for x in (loss, expected / 20)))


def test_several_numbers_of_items_raise(head, hidden, target):
    with pytest.raises(InvalidInputError, match="num_items_in_batch"):
        fixed_fused_linear_cross_entropy(hidden, head, target, torch.tensor([3, 4]))


@pytest.mark.parametrize("items", [None, 11])
def test_the_causal_loss_predicts_the_next_token(items, head):
    hidden = random(2, 5, HIDDEN, seed=7).requires_grad_()
    labels = torch.tensor([[1, 2, -100, 3, 4], [0, -100, 6, 5, 2]])
    output = LigerForCausalLMLoss(
        hidden, head, labels, HIDDEN, items, return_token_accuracy=True, return_predicted_tokens=True, cache_position=3
    )
    logits, following = (hidden @ head.T)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
    expected = F.cross_entropy(logits, following, reduction="mean" if items is None else "sum") / (items or 1)
    torch.testing.assert_close(output.loss, expected)
    assert output.predicted_tokens.shape == (10,)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]  # not contiguous
    plain = LigerForCausalLMLoss(hidden, head, None, HIDDEN, items, shift_labels=shifted)
    torch.testing.assert_close(plain, expected)
    smooth = LigerForCausalLMLoss(hidden, head, labels, HIDDEN, label_smoothing=0.3)
    torch.testing.assert_close(smooth, F.cross_entropy(logits, following, label_smoothing=0.3))


def test_the_causal_loss_refuses_what_it_would_drop(head, hidden, target):
    for options in ({"reduction": "sum"}, {"softcap": 3.0}, {"return_z_loss": True}):
        with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
            LigerForCausalLMLoss(hidden, head, target, HIDDEN, **options)
    with pytest.raises(InvalidInputError, match="labels"):
        LigerForCausalLMLoss(hidden, head, None, HIDDEN)


def test_results_unpack():
    loss = torch.ones(())
    assert unpack_cross_entropy_result(loss) == (loss, None, None, None)
    assert unpack_cross_entropy_result((loss, None)) == (loss, None, None, None)
    assert unpack_cross_entropy_result(CrossEntropyOutput(loss, token_accuracy=loss)) == (loss, None, loss, None)


@pytest.mark.ci  # five seconds for Dynamo
def test_options_and_outputs_are_in_one_graph(head, hidden, target):
    module = LigerFusedLinearCrossEntropyLoss(
        WEIGHTS,
        label_smoothing=0.1,
        lse_square_scale=1e-2,
        use_token_scaling=True,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )

    def causal(hidden, head, target, items):
        return LigerForCausalLMLoss(hidden, head, target, HIDDEN, items, position_ids=target)

    torch._dynamo.reset()
    for function, arguments in (
        (module, (head, hidden, target)),
        (causal, (hidden, head, target, 7)),
        (causal, (hidden, head, target, torch.tensor(7))),
    ):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        found, expected = (unpack_cross_entropy_result(f(*arguments)) for f in (compiled, function))
        torch.testing.assert_close([t for t in found if t is not None], [t for t in expected if t is not None])
        torch.testing.assert_close(*(torch.autograd.grad(t[0], (head, hidden)) for t in (found, expected)))
