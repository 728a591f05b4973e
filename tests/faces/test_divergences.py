"""Options of the divergences."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from liger_registry.errors import InvalidInputError, UnsupportedOptionError
from liger_registry.transformers import (
    LigerFusedLinearJSD,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
    liger_fused_linear_jsd,
    liger_jsd,
    liger_kl_div,
    liger_tvd,
)

ROWS, VOCAB = 6, 9
LABELS = torch.tensor([0, -100, 7, 7, 0, -100])
MASK = (LABELS != -100)[:, None]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def x():
    return random(ROWS, VOCAB).log_softmax(-1).requires_grad_()


@pytest.fixture
def y():
    return random(ROWS, VOCAB, seed=1).log_softmax(-1)


def reduced(terms, reduction, rows=ROWS):
    return {
        "none": lambda: terms,
        "sum": lambda: terms.sum(),
        "mean": lambda: terms.sum() / (rows * VOCAB),
        "batchmean": lambda: terms.sum() / rows,
    }[reduction]()


def same(found, expected, leaf):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    upstream = random(*expected.shape, seed=5)
    torch.testing.assert_close(*(torch.autograd.grad(t, leaf, upstream, retain_graph=True) for t in (found, expected)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_torchs(reduction, log_target, x, y):
    target = y if log_target else y.exp()
    expected = reduced(F.kl_div(x, target, reduction="none", log_target=log_target), reduction)
    same(LigerKLDIVLoss(reduction=reduction, log_target=log_target)(x, target), expected, x)
    same(liger_kl_div(x, target, reduction=reduction, log_target=log_target), expected, x)


def test_kl_div_takes_torchs_arguments_behind_eps(x, y):
    module = LigerKLDIVLoss(0.25, None, None, "sum")
    assert (module.eps, module.reduction, module.log_target) == (0.25, "sum", False)
    p = y.exp()
    same(module(x, p), (p * (p.clamp_min(0.25).log() - x)).sum(), x)


def test_what_torch_has_deprecated_raises(x, y):
    for options in ({"size_average": False}, {"reduce": False}):
        with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
            liger_kl_div(x, y.exp(), **options)
    with pytest.raises(UnsupportedOptionError, match="reduction"):
        liger_kl_div(x, y.exp(), reduction="max")


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("ignore_index", [-100, 7])
def test_tvd_is_half_the_sum_of_differences(reduction, labels, ignore_index, x, y):
    p = x.detach().exp().requires_grad_()
    counted = torch.ones_like(MASK) if labels is None else (labels != ignore_index)[:, None]
    terms = torch.where(counted, (p - y.exp()).abs() / 2, 0.0)
    expected = reduced(terms, reduction, int(counted.sum()))
    same(LigerTVDLoss(reduction, ignore_index)(p, y.exp(), labels), expected, p)
    same(liger_tvd(p, y.exp(), labels, reduction, ignore_index), expected, p)


def jsd(x, y, beta, counted):
    p, q = y.exp(), x.exp()
    if beta in (0.0, 1.0):
        terms = p * (y - x) if beta == 0.0 else q * (x - y)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        terms = beta * p * (y - log_m) + (1 - beta) * q * (x - log_m)
    return torch.where(counted, terms, 0.0).sum() / counted.sum()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("labels", "ignore_index"), [(None, -100), (LABELS, -100), (LABELS, 7)])
def test_jsd_is_the_formula(beta, labels, ignore_index, x, y):
    counted = torch.ones_like(MASK) if labels is None else (labels != ignore_index)[:, None]
    expected = jsd(x, y, beta, counted)
    same(LigerJSD(beta, ignore_index)(x, y, labels), expected, x)
    same(liger_jsd(x, y, labels, beta, ignore_index), expected, x)


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("labels", "ignore_index"), [(None, -100), (LABELS, -100), (LABELS, 7)])
def test_the_fused_jsd_is_the_formula(beta, temperature, labels, ignore_index):
    student, head, teacher, teacher_head = (
        random(*shape, seed=n).requires_grad_()
        for n, shape in enumerate(((ROWS, 4), (VOCAB, 4), (ROWS, 3), (VOCAB, 3)))
    )
    counted = torch.ones_like(MASK) if labels is None else (labels != ignore_index)[:, None]
    x, y = ((a @ b.T / temperature).log_softmax(-1) for a, b in ((student, head), (teacher, teacher_head)))
    expected = jsd(x, y.detach(), beta, counted)
    module = LigerFusedLinearJSD(beta, ignore_index, temperature)
    functional = liger_fused_linear_jsd(
        student, head, teacher, teacher_head, labels, beta, ignore_index, temperature, torch.float64
    )
    for found in (module(student, head, teacher, teacher_head, labels), functional):
        torch.testing.assert_close(found, expected)
        leaves = student, head
        torch.testing.assert_close(*(torch.autograd.grad(t, leaves, retain_graph=True) for t in (found, expected)))


def test_losses_have_the_dtypes_of_liger_kernel(x, y):
    x, y = x.detach().bfloat16(), y.bfloat16()
    assert LigerJSD()(x, y).dtype == torch.bfloat16
    assert LigerKLDIVLoss(reduction="batchmean")(x, y.exp()).dtype == torch.float32
    assert LigerTVDLoss()(x.exp(), y.exp()).dtype == torch.float32
    hidden, head = random(ROWS, 4).bfloat16(), random(VOCAB, 4).bfloat16()
    assert LigerFusedLinearJSD()(hidden, head, hidden, head, None).dtype == torch.float32


def test_what_does_not_fit_raises(x, y):
    with pytest.raises(UnsupportedOptionError, match="temperature"):
        LigerFusedLinearJSD(temperature=0)
    with pytest.raises(UnsupportedOptionError, match="beta"):
        LigerJSD(beta=1.5)(x, y)
    with pytest.raises(UnsupportedOptionError, match="reduction"):
        LigerTVDLoss("max")(x.exp(), y.exp())
    with pytest.raises(UnsupportedOptionError, match="accum_dtype"):
        LigerFusedLinearJSD(accum_dtype=torch.float16)(x, y, x, y, None)
    with pytest.raises(InvalidInputError, match="shift_labels"):
        LigerJSD()(x, y, LABELS[:3])
