"""``logit_cosine`` against PyTorch's own losses: values, gradients, some rows at a time, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from liger_registry import registry
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.kernels import logit_cosine_heuristics as h
from liger_registry.op import DimKind
from liger_registry.ops import logit_cosine

OP = logit_cosine.OP
LABELS = torch.tensor([0, -100, 2, 3, -100, 5, 18])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "eager"])


def call(implementation, *inputs, **options):
    handle = OP.reference if implementation == "reference" else registry.get(OP.name, implementation=implementation)
    return handle(*inputs, **options)


def slabs(rows=7, vocab=19, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, vocab, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def losses(student, teacher, labels):
    """Of rows, by PyTorch's own; 0 where they do not count."""
    distance = 1 - functional.cosine_similarity(student, teacher, dim=-1)
    return torch.where(labels == -100, 0.0, distance), functional.cross_entropy(student, labels, reduction="none")


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_a_cosine_and_a_cross_entropy(implementation, scale):
    student, teacher = slabs()
    leaf = student.clone().requires_grad_()
    right = losses(leaf, teacher, LABELS)
    (expected,) = torch.autograd.grad((0.7 * right[0] - 1.3 * right[1]).sum() * (scale or 1.0), leaf)
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    told = {"soft": 0.7, "hard": -1.3, "cross_entropy": True}
    distance, nll, slope = call(implementation, student, teacher, LABELS, factor, gradient=True, **told)
    for mine, its in ((distance, right[0]), (nll, right[1]), (slope, expected)):
        torch.testing.assert_close(mine, its.detach(), rtol=1e-10, atol=1e-14)
    again, other = call(implementation, student, teacher, LABELS, factor, **told)
    assert torch.equal(again, distance)
    assert torch.equal(other, nll)


@IMPLEMENTATIONS
def test_without_labels_every_row_counts(implementation):
    student, teacher = slabs()
    leaf = student.clone().requires_grad_()
    right = 1 - functional.cosine_similarity(leaf, teacher, dim=-1)
    (expected,) = torch.autograd.grad(right.sum(), leaf)
    distance, slope = call(implementation, student, teacher, gradient=True)
    torch.testing.assert_close(distance, right.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-14)
    assert torch.equal(call(implementation, student, teacher), distance)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_some_rows_at_a_time_change_nothing(dtype, in_place, monkeypatch):
    student, teacher = slabs(dtype=dtype)
    told = {"cross_entropy": True, "gradient": True}
    right = call("eager", student, teacher, LABELS, **told)
    monkeypatch.setattr(h, "AT_ONCE", 4 * 19 * 3)
    assert h.rows_at_once(19) == 3
    given = student.clone()
    found = call("eager", given, teacher, LABELS, in_place=in_place, **told)
    assert (found[2].data_ptr() == given.data_ptr()) is in_place
    assert in_place or torch.equal(given, student)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    exact = call("reference", student.double(), teacher.double(), LABELS, **told)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found[2].double(), exact[2], rtol=2 * eps, atol=1e-7)


@IMPLEMENTATIONS
def test_rows_of_zeros_have_no_direction(implementation):
    student, teacher = slabs(4)
    student[0], teacher[1], student[2], teacher[2] = 0.0, 0.0, 0.0, 0.0
    distance, slope = call(implementation, student, teacher, gradient=True)
    assert distance[:3].tolist() == [1.0, 1.0, 1.0]
    assert not slope[:3].any()
    assert slope[3].any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_what_is_no_number_stays_none_where_it_counts(implementation, value):
    student, teacher = slabs()
    student[0, 3], teacher[2, 3], student[3], teacher[3, 0] = value, value, 0.0, value
    student[1], teacher[4] = value, value  # do not count
    labels = LABELS.clone()
    labels[5] = 19  # no class
    distance, nll, slope = call(implementation, student, teacher, labels, gradient=True, cross_entropy=True)
    assert distance.isnan().tolist() == [True, False, True, True, False, False, False]
    assert nll[5].isnan()
    assert nll[[1, 4]].tolist() == [0.0, 0.0]
    assert slope.isnan().all(-1).tolist() == [True, False, True, True, False, True, False]
    assert not slope[[1, 4]].any()


def test_equal_rows_have_exactly_no_distance():
    student = slabs(dtype=torch.float32)[0]
    distance, slope = call("eager", student, student.clone(), gradient=True)
    assert not distance.any()
    assert not slope.any()


@pytest.mark.parametrize(
    ("change", "error", "way_out"),
    [
        ({0: torch.ones(7, 18)}, InvalidInputError, "reshape"),
        ({0: torch.ones(7, 19).int()}, UnsupportedDtypeError, "float32"),
        ({2: LABELS[:3]}, InvalidInputError, "leading shape"),
        ({2: None}, InvalidInputError, "cross-entropy"),
        ({3: torch.ones(1)}, InvalidInputError, "no dimensions"),
    ],
)
def test_inputs_that_contradict_the_contract(change, error, way_out):
    inputs = [*slabs(dtype=torch.float32), LABELS, None]
    for number, value in change.items():
        inputs[number] = value
    with pytest.raises(error, match=OP.name) as raised:
        registry.get(OP.name)(*inputs, cross_entropy=True)
    assert way_out in str(raised.value)


def test_examples_are_their_problems():
    OP.check()
    assert OP.dims["rows"] is DimKind.BUCKET
    for dtype in ("float32", "bfloat16", "float64"):
        for description in OP.odd(dtype):
            assert OP.has(OP.problem(description, "forward", OP.schemes[0].name))
