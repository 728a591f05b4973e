"""``logit_cosine`` in the interpreter: what conformance does not try.

Those are the gradient in the place of the logits, rows that are near, equal, empty or hold no numbers, labels that are
no classes, and a GPU's roundings.
"""

from __future__ import annotations

import math

import pytest
import torch
from gpu_rounding import round_as_a_gpu
from torch.nn import functional

from liger_registry import Device
from liger_registry.kernels import logit_cosine

DEVICE = Device.parse("interpreter")
OPTIONS = {"soft": 0.7, "hard": 1.3, "cross_entropy": True, "ignore_index": -100, "gradient": True, "in_place": False}
EVERY = pytest.mark.parametrize("implementation", ["row", "column_split"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def run(implementation, student, teacher, labels=None, scale=None, **options):
    config = {"block": 16, "num_warps": 4} | ({"splits": 2} if implementation == "column_split" else {})
    forward = getattr(logit_cosine, f"forward_{implementation}")
    return forward(student, teacher, labels, scale, device=DEVICE, **OPTIONS | options, **config)


def truth(student, teacher, labels, scale=1.0):
    """Of rows with a direction, in float64 by PyTorch's own losses."""
    leaf, other = student.double().requires_grad_(), teacher.double()
    distance = 1 - functional.cosine_similarity(leaf, other, dim=-1)
    nll = functional.cross_entropy(leaf, labels, reduction="none")  # of what does not count 0
    distance = torch.where(labels == -100, 0.0, distance)
    (slope,) = torch.autograd.grad((OPTIONS["soft"] * distance + OPTIONS["hard"] * nll).sum() * scale, leaf)
    return distance.detach(), nll.detach(), slope


def random(rows, vocab, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, vocab, generator=generator).to(dtype) for _ in range(2)]


@pytest.fixture(params=[pytest.param("numpy", marks=pytest.mark.ci), "gpu"])
def rounding(request, monkeypatch):
    """Products that are rounded before they are added, and those that are not."""
    if request.param == "gpu":
        round_as_a_gpu(monkeypatch)


@EVERY
@DTYPES
@pytest.mark.parametrize("vocab", [41, pytest.param(64, marks=pytest.mark.ci)])
def test_the_gradient_may_take_the_place_of_strided_logits(implementation, dtype, vocab):
    slabs = random(3, 80, dtype=dtype)
    student, teacher = (slab[:, :vocab] for slab in slabs)
    labels, scale = torch.tensor([vocab - 1, -100, 2]), torch.tensor(0.5)
    student[1], teacher[1] = math.nan, math.inf  # does not count
    known = [torch.where((labels == -100)[:, None], 0.5, t) for t in (student, teacher)]
    distance, nll, right = truth(*known, labels, 0.5)
    behind = slabs[0][:, vocab:].clone()
    found = run(implementation, student, teacher, labels, scale, in_place=True)
    assert found[2].data_ptr() == slabs[0].data_ptr()
    torch.testing.assert_close(found[0].double(), distance, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[1].double(), nll, rtol=1e-6, atol=1e-7)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(student.double(), right, rtol=2 * eps, atol=3e-8)
    assert torch.equal(slabs[0][:, vocab:], behind)


@EVERY
def test_what_is_not_asked_for_is_not_there(implementation):
    student, teacher = random(3, 41)
    distance, nll, slope = run(implementation, student, teacher, cross_entropy=False, gradient=False)
    assert nll is None
    assert slope is None
    again, _, slope = run(implementation, student, teacher, cross_entropy=False)
    assert torch.equal(distance, again)
    leaf = student.double().requires_grad_()
    right = 1 - functional.cosine_similarity(leaf, teacher.double(), dim=-1)
    torch.testing.assert_close(distance.double(), right.detach(), rtol=1e-6, atol=0.0)
    (expected,) = torch.autograd.grad(0.7 * right.sum(), leaf)
    torch.testing.assert_close(slope.double(), expected, rtol=1e-5, atol=1e-8)


@EVERY
def test_memory_that_rows_share_is_not_written(implementation):
    (row, teacher), labels = random(1, 41), torch.tensor([1, 2, 3])
    student = row.expand(3, 41)
    before = row.clone()
    slope = run(implementation, student, teacher.expand(3, 41), labels, in_place=True)[2]
    assert torch.equal(row, before)
    torch.testing.assert_close(slope.double(), truth(student, teacher.expand(3, 41), labels)[2], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("rounding")
@EVERY
@DTYPES
def test_equal_rows_have_exactly_no_distance(implementation, dtype):
    student = random(4, 48, dtype=dtype)[0] * torch.tensor([[1e-3], [1.0], [37.0], [900.0]]).to(dtype)
    distance, _, slope = run(implementation, student, student.clone(), cross_entropy=False)
    assert not distance.any()
    assert not slope.any()


@pytest.mark.usefixtures("rounding")
@EVERY
def test_near_rows_keep_their_digits(implementation):
    """A distance of 1e-8, where a cosine in fp32 is 1."""
    student, noise = random(4, 48)
    teacher = student + 1e-4 * noise
    distance, _, slope = run(implementation, student, teacher, cross_entropy=False)
    leaf, other = student.double().requires_grad_(), teacher.double()
    right = 1 - functional.cosine_similarity(leaf, other, dim=-1)
    assert right.max() < 2e-8
    torch.testing.assert_close(distance.double(), right.detach(), rtol=1e-3, atol=0.0)
    (expected,) = torch.autograd.grad(0.7 * right.sum(), leaf)
    assert (slope.double() - expected).norm() <= 2e-3 * expected.norm()


@EVERY
def test_parallel_rows_have_a_rounding_of_a_distance_at_most(implementation):
    student = random(4, 48)[0]
    factors = torch.tensor([[3.0], [1.1], [0.01], [-1.0]])
    distance = run(implementation, student, student * factors, cross_entropy=False)[0]
    assert (distance >= 0).all()
    torch.testing.assert_close(distance, torch.tensor([0.0, 0.0, 0.0, 2.0]), rtol=1e-6, atol=5e-7)


@EVERY
def test_rows_of_zeros_have_no_direction(implementation):
    student, teacher = random(4, 41)
    student[0], teacher[1] = 0.0, 0.0
    student[2], teacher[2] = 0.0, 0.0
    distance, _, slope = run(implementation, student, teacher, cross_entropy=False)
    assert distance[:3].tolist() == [1.0, 1.0, 1.0]
    assert not slope[:3].any()
    assert slope[3].any()
    # The cross-entropy does not depend on a direction.
    nll, slope = run(implementation, student, teacher, torch.zeros(4, dtype=torch.long))[1:]
    right = functional.cross_entropy(student, torch.zeros(4, dtype=torch.long), reduction="none")
    torch.testing.assert_close(nll, right)
    torch.testing.assert_close(slope[0], 1.3 * (torch.full((41,), 1 / 41) - functional.one_hot(torch.tensor(0), 41)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@EVERY
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_number_stays_none(implementation, value, side):
    pair = random(4, 41)
    right = run(implementation, *pair, cross_entropy=False)
    pair[side][0, 5] = value
    pair[side][1, 5] = value
    pair[1 - side][1] = 0.0
    pair[side][2] = value
    distance, _, slope = run(implementation, *pair, cross_entropy=False)
    assert distance[:3].isnan().all()
    assert slope[:3].isnan().all()
    assert torch.equal(distance[3], right[0][3])
    assert torch.equal(slope[3], right[2][3])


@EVERY
def test_a_label_that_is_no_class_spoils_its_row(implementation):
    pair, labels = random(4, 41), torch.tensor([0, 41, -1, 40])
    distance, nll, slope = run(implementation, *pair, labels)
    assert distance.isfinite().all()
    assert nll.isnan().tolist() == [False, True, True, False]
    assert slope.isnan().all(-1).tolist() == [False, True, True, False]
    assert slope[[0, 3]].isfinite().all()


@EVERY
def test_a_confident_row_keeps_its_digits(implementation):
    student, teacher = random(1, 41)
    student[:, 7] = 40.0
    _, nll, slope = run(implementation, student, teacher, torch.tensor([7]), soft=0.0)
    others = [*range(7), *range(8, 41)]
    shares = (student.double()[:, others] - 40.0).exp()  # the sum of exponentials is 1 and 1e-15 more
    torch.testing.assert_close(nll.double(), shares.sum(-1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(slope[:, others].double(), 1.3 * shares, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(slope[:, 7].double(), -1.3 * shares.sum(-1), rtol=1e-5, atol=0.0)
