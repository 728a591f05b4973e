"""The accuracy rule lets right results pass and finds one wrong element; every fault here is planted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from liger_registry.accuracy import Verdict, judge

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def elementwise(dtype, shape=(64, 512)):
    """``x * w`` in float64 and in a dtype, and the size of its terms."""
    x, w = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    right = x.double() * w.double()
    return right, x * w, right.abs()


def summed(dtype, rows=4096, columns=128):
    """A sum over rows in float64, in fp32 rounded once, the size of its terms, and the terms."""
    terms = torch.randn(rows, columns).to(dtype)
    right = terms.double().sum(0)
    size = right.abs() + terms.double().pow(2).sum(0).sqrt()
    wide = torch.promote_types(dtype, torch.float32)
    return right, terms.to(wide).sum(0).to(dtype), size, terms


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass(dtype):
    right, formula, size = elementwise(dtype)
    for result in (formula, right.to(dtype), torch.nextafter(right.to(dtype), torch.full((), math.inf, dtype=dtype))):
        assert judge("y", result, right, formula, size).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_in_another_order_passes(dtype):
    right, formula, size, terms = summed(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    other = terms.flip(0).to(wide).reshape(64, 64, -1).sum(0).sum(0).to(dtype)
    verdict = judge("sum", other, right, formula, size, 4096)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_row_of_4096_is_found(dtype):
    right, formula, size, terms = summed(dtype)
    terms = terms.clone()
    wide = torch.promote_types(dtype, torch.float32)
    terms[-1] = 32 * terms[-1].clamp(-1, 1).add(1)  # as in the style "tail", a row that weighs
    right, formula = terms.double().sum(0), terms.to(wide).sum(0).to(dtype)
    size = right.abs() + terms.double().pow(2).sum(0).sqrt()
    verdict = judge("sum", terms[:-1].to(wide).sum(0).to(dtype), right, formula, size, 4096)
    assert not verdict.passed


def test_a_dropped_row_is_found_even_where_it_weighs_like_the_others():
    right, formula, size, terms = summed(torch.bfloat16, columns=4096)
    dropped = terms[:-1].float().sum(0).bfloat16()
    assert not judge("sum", dropped, right, formula, size, 4096).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_is_found(dtype):
    right, formula, size = elementwise(dtype)
    result = formula.clone()
    result[5, 7] *= 1.25
    verdict = judge("y", result, right, formula, size)
    assert not verdict.passed
    assert verdict.worst > verdict.worst_limit
    assert "y: error" in str(verdict)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_found(dtype, value):
    right, formula, size = elementwise(dtype)
    result = formula.clone()
    result[0, 0] = value
    verdict = judge("y", result, right, formula, size)
    assert not verdict.passed
    assert "1 of 32768 elements" in str(verdict)


def test_a_result_may_be_a_tenth_worse_than_the_formula():
    """Where the formula itself is far off, as in a cast to half the bits, its error is the yardstick."""
    right = torch.randn(64, 64, dtype=torch.float64)
    noise = torch.randn(64, 64, dtype=torch.float64).clamp(-1, 1) * 1e-3
    for kind in (noise, noise * (noise.abs() > 9.9e-4)):  # all elements, and the few that are worst
        formula = (right + kind).float()
        for factor, passes in ((1.0, True), (1.05, True), (1.15, False), (1.5, False)):
            assert judge("y", (right + factor * kind).float(), right, formula, right.abs()).passed is passes, factor


def test_a_worst_element_may_be_a_tenth_worse_than_the_formulas():
    right = torch.ones(4096, dtype=torch.float64)
    formula, result = right.clone(), right.clone()
    formula[7] += 1e-3
    for factor, passes in ((1.05, True), (1.15, False), (1.5, False)):
        result[7] = 1 + factor * 1e-3
        # The other elements make up the norm, so that one alone cannot fail by it.
        formula[8:], result[8:] = 1 + 9e-4, 1 + 8e-4
        verdict = judge("y", result.float(), right, formula.float(), right)
        assert verdict.error < verdict.error_limit
        assert verdict.passed is passes, factor


def test_shape_and_dtype():
    right, formula, size = elementwise(torch.bfloat16)
    assert "shape (64, 511), not (64, 512)" in str(judge("y", formula[:, 1:], right, formula, size))
    assert "dtype torch.float32, not torch.bfloat16" in str(judge("y", formula.float(), right, formula, size))
    assert not judge("y", formula[:1], right, formula, size).passed
    assert not judge("y", formula.float(), right, formula, size).passed


def overflowing():
    """Terms whose product is 8e4, more than fp16 holds, in one element."""
    x, w = torch.ones(4, 8, dtype=torch.float16), torch.full((8,), 2.0, dtype=torch.float16)
    x[1, 3] = 4e4
    right = x.double() * w.double()
    return right, x * w


def test_overflow_where_the_right_value_overflows():
    right, formula = overflowing()
    assert formula[1, 3] == math.inf
    assert judge("y", formula, right, formula, right.abs()).passed
    for value in (65504.0, 0.0, -math.inf, math.nan):
        wrong = formula.clone()
        wrong[1, 3] = value
        assert not judge("y", wrong, right, formula, right.abs()).passed
    # The rest is still looked at.
    wrong = formula.clone()
    wrong[0, 0] = 3
    assert not judge("y", wrong, right, formula, right.abs()).passed


def test_overflow_of_the_formula_alone():
    right = torch.full((4, 8), 3e4, dtype=torch.float64)
    formula = right.half()
    formula[1, 3] = math.inf  # such as x * x / x
    good = right.half()
    for value, passes in (
        (3e4, True),
        (math.inf, True),
        (0.0, False),
        (-math.inf, False),
        (math.nan, False),
        (2e4, False),
    ):
        result = good.clone()
        result[1, 3] = value
        assert judge("y", result, right, formula, right.abs()).passed is passes, value


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype):
    right = torch.zeros(8, 8, dtype=torch.float64)
    zero = right.to(dtype)
    assert judge("y", zero, right, zero, right).passed
    wrong = zero.clone()
    wrong[3, 3] = 1e-3
    assert not judge("y", wrong, right, zero, right).passed
    assert not judge("y", zero * math.nan, right, zero, right).passed


def test_rounding_errors_may_be_as_large_as_the_terms_allow():
    # 1e4 - 1e4 + 1: in fp32 the sum is off by an ulp of 1e4, and that is no fault.
    right, size = torch.tensor([1.0], dtype=torch.float64), torch.tensor([2e4], dtype=torch.float64)
    formula = torch.tensor([1.0 + 2**-10])
    assert judge("sum", torch.tensor([1.0 - 2**-10]), right, formula, size, 3).passed
    assert not judge("sum", torch.tensor([1.5]), right, formula, size, 3).passed


def test_subnormal_results_pass():
    right = torch.full((16,), 1e-8, dtype=torch.float64)  # less than fp16's least number
    assert judge("y", right.half(), right, right.half(), right).passed


def test_nothing_to_compare():
    empty = torch.empty(0, 4)
    assert judge("y", empty, empty.double(), empty, empty.double()).passed
    assert not judge("y", torch.empty(0, 5), empty.double(), empty, empty.double()).passed


def test_nan_never_passes():
    assert not Verdict("y", math.nan, 1.0, 0.0, 1.0).passed
    assert not Verdict("y", 0.0, 1.0, math.nan, 1.0).passed
    assert Verdict("y", 1.0, 1.0, 1.0, 1.0).passed
