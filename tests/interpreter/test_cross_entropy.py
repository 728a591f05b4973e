"""The Triton implementations of cross_entropy and its stage in Triton's interpreter, beyond the conformance suite."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from liger_registry import Device
from liger_registry.kernels import cross_entropy, logit_statistics
from liger_registry.ops import cross_entropy as contract
from liger_registry.ops.logit_statistics import OP as STATISTICS

DEVICE = Device.parse("interpreter")
INF = float("inf")
CONFIGS = {
    "multi_row": {"num_warps": 4, "block_rows": 4},
    "looping": {"num_warps": 4, "block": 16, "programs_per_unit": 1, "num_stages": 3},
    "column_split": {"num_warps": 4, "block": 16, "splits": 2},
}
WIDE = {
    "looping": {"num_warps": 4, "block": 4096},
    "column_split": {"num_warps": 4, "block": 4096, "splits": 4},
    "multi_row": {"num_warps": 4},
}
SCHEME = contract.OP.schemes[0]


def options(**given):
    return {o.name: o.default for o in contract.OP.options} | given


def both(config, logits, target, weight=None, items=None, upstream=None, **given):
    """``(loss, gradient)`` and all that forward returns."""
    found = cross_entropy.forward(logits, target, weight, items, device=DEVICE, **options(**given), **config)
    upstream = torch.ones_like(found[0]) if upstream is None else upstream
    (gradient,) = cross_entropy.backward(
        upstream, None, None, None, logits, target, weight, items, *found[4:],
        device=DEVICE, needs=(True,), **options(**given), **config,
    )  # fmt: skip
    return found[0], gradient, found


def right(logits, target, weight=None, items=None, upstream=None, **given):
    leaf = logits.detach().double().requires_grad_()
    wide = None if weight is None else weight.double()
    loss = SCHEME.reference(leaf, target, wide, items, **options(**given))[0]
    upstream = torch.ones_like(loss) if upstream is None else upstream.double()
    return loss.detach(), torch.autograd.grad(loss, leaf, upstream)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_confident_rows_keep_their_gradient(name, dtype):
    shares = torch.tensor([0.9, 0.99, 0.999], dtype=torch.float64)
    logits = torch.zeros(3, 32000, dtype=dtype)
    logits[:, 31999] = (shares / (1 - shares) * 31999).log().to(dtype)
    target = torch.full((3,), 31999)
    loss, gradient, _ = both(WIDE[name], logits, target, reduction="sum")
    wanted, slopes = right(logits, target, reduction="sum")
    torch.testing.assert_close(gradient[:, 31999].double(), slopes[:, 31999], rtol=0.005, atol=0)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_extreme_logits_and_targets_that_are_no_class(name):
    logits = torch.randn(7, 41)
    logits[0, :30] = -INF  # the first block of a loop, the first part of a split
    logits[1, 16:] = -INF
    logits[2, 5], logits[2, 6] = 1e30, -1e30
    logits[3] = -INF
    logits[3, 40] = 2.0  # the target has it all
    target = torch.tensor([35, 3, 5, 40, 41, -1, -100])
    logits[6] = float("nan")  # not counted, so not read
    loss, gradient, found = both(CONFIGS[name], logits, target, reduction="none", return_predicted_tokens=True)
    wanted, slopes = right(logits, target, reduction="none")
    torch.testing.assert_close(loss.double(), wanted, equal_nan=True, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slopes, equal_nan=True, rtol=1e-5, atol=1e-7)
    assert loss.isnan().tolist() == [False] * 4 + [True, True, False]
    assert gradient[[4, 5]].isnan().all()
    assert (gradient[0, :30] == 0).all()
    assert found[3].tolist()[2:] == [5, 40, -1, -1, -1]


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_to_count(name):
    for rows in (0, 3):
        logits, target = torch.randn(rows, 40), torch.full((rows,), -100)
        extra = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "return_token_accuracy": True}
        loss, gradient, found = both(CONFIGS[name], logits, target, torch.ones(40), **extra)
        assert (loss == 0, (gradient == 0).all(), found[2] == 0) == (True, True, True)


@pytest.mark.parametrize("rows", [1024, 9000])
def test_many_rows_are_summed_in_one_launch_or_two(rows):
    torch.manual_seed(0)
    logits, target = torch.randn(rows, 2), torch.randint(2, (rows,))
    target[::3] = -100
    weight = torch.tensor([0.5, 2.0])
    found = {}
    for items in (None, torch.tensor(77)):
        saved = SCHEME.reference(logits, target, weight, None, **options())
        loss, accuracy = torch.full((), float("nan")), torch.full((), float("nan"))
        counts = torch.full((2,), float("nan"))
        cross_entropy.reduce_rows(
            target, weight, None, items, saved[4], saved[5], None, logits.argmax(-1), loss, None, accuracy, counts,
            -100, 0.0, 0.0, vocab=2, reduction="mean",
        )  # fmt: skip
        found[items] = loss, accuracy
        wanted = SCHEME.reference(
            logits.double(), target, weight.double(), items, **options(return_token_accuracy=True)
        )
        torch.testing.assert_close(loss.double(), wanted[0])
        torch.testing.assert_close(accuracy.double(), wanted[2])
        torch.testing.assert_close(counts.double(), wanted[6])


@pytest.mark.parametrize("name", CONFIGS)
def test_views_are_read_through_their_strides(name, monkeypatch):
    base, labels = torch.randn(2, 3, 48, dtype=torch.bfloat16), torch.randint(48, (2, 3))
    logits, target = base[:, :-1], labels[:, 1:]
    wanted = right(logits, target)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    loss, gradient, _ = both(CONFIGS[name], logits, target)
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), wanted[1], rtol=0.01, atol=1e-6)
    _, columns, _ = both(CONFIGS[name], base[:1, :, :20].transpose(0, 1), torch.zeros(3, 1, dtype=torch.int64))
    assert columns.shape == (3, 1, 20)


@pytest.mark.parametrize("name", CONFIGS)
def test_in_place_writes_where_it_may(name):
    target = torch.tensor([3, -100, 40])
    base = torch.randn(3, 41)
    _, wanted, _ = both(CONFIGS[name], base, target)
    for logits, writes in ((base.clone(), True), (base[:1].expand(3, 41), False), (base.t().contiguous().t(), False)):
        before = logits.clone()
        _, gradient, _ = both(CONFIGS[name], logits, target, in_place=True)
        assert (gradient.data_ptr() == logits.data_ptr()) is writes
        assert torch.equal(logits, gradient if writes else before)
        if writes:
            assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_stage_takes_statistics_as_they_are_given(name):
    torch.manual_seed(2)
    logits, target = torch.randn(4, 41), torch.tensor([3, 40, -5, 99])
    given = {o.name: o.default for o in STATISTICS.options} | {"softcap": 3.0, "scale": 1.3, "entropy": True}
    # Those of a whole row, of which this is a slab.
    log_rest, target_logit, mean = torch.full((4,), 9.0), torch.full((4,), 2.5), torch.full((4,), -1.0)
    grads = [torch.randn(4) for _ in range(4)]
    for absent in (None, 0, 1, 3):
        some = [None if i in (2, absent) else g for i, g in enumerate(grads)]
        tensors = (*some, None, None, logits, target, None, log_rest, target_logit, mean)
        (found,) = logit_statistics.backward(*tensors, device=DEVICE, needs=(True,), **given, **CONFIGS[name])
        (wanted,) = STATISTICS.schemes[0].backward(*tensors, needs=(True,), **given)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    assert logit_statistics.backward(*tensors, device=DEVICE, needs=(False,), **given, **CONFIGS[name]) == (None,)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_share_of_a_row_is_more_than_one(name):
    """Statistics of other roundings than these logits have: ``exp(z - log)`` would be infinite, and NaN times 0."""
    logits, target = torch.tensor([[128.0, 0.0], [256.0, 0.0], [128.0, 0.0]]), torch.tensor([-1, -1, 1])
    grads = torch.tensor([2.0, 0.0, 3.0]), torch.tensor([0.0, 0.0, 5.0])
    given = {o.name: o.default for o in STATISTICS.options} | {"entropy": True}
    mean, saved = torch.tensor([128.0, 256.0, 128.0]), (torch.zeros(3), torch.zeros(3))
    for slope in (None, torch.zeros(3)):
        tensors = (*grads, None, slope, None, None, logits, target, None, *saved, mean)
        (found,) = logit_statistics.backward(*tensors, device=DEVICE, needs=(True,), **given, **CONFIGS[name])
        assert found.tolist() == [[2.0, 2.0], [0.0, 0.0], [3.0, 5.0]]


def test_tanh_and_its_slope_are_right_near_0_and_far_out():
    from liger_registry.kernels.logit_statistics import forward

    x = torch.cat([torch.logspace(-30, 2, 60), -torch.logspace(-30, 2, 60)])[:, None]
    target = torch.zeros(len(x), dtype=torch.int64)
    given = {o.name: o.default for o in STATISTICS.options} | {"softcap": 2.0}
    with numpy.errstate(under="ignore"):
        found = forward(x, target, None, device=DEVICE, **given, **CONFIGS["multi_row"])
        (slope,) = logit_statistics.backward(
            None, torch.ones(len(x)), None, None, None, None, x, target, None, *found[:2], None,
            device=DEVICE, needs=(True,), **given, **CONFIGS["multi_row"],
        )  # fmt: skip
    u = x.double()[:, 0] / 2
    torch.testing.assert_close(found[1].double(), 2 * torch.tanh(u), rtol=5e-7, atol=0)
    right_slope = 1 / torch.cosh(u) ** 2
    near = u.abs() < 30
    torch.testing.assert_close(slope[near, 0].double(), right_slope[near], rtol=1e-5, atol=0)
    assert math.isfinite(float(slope.abs().max()))
