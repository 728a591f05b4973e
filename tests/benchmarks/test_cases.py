"""Bounds by arithmetic: at a copy of 4.27 TB/s they are those that the targets were set with, in ms."""

from __future__ import annotations

import pytest

from benchmarks.cases import NAMES, TINY, Case
from benchmarks.table import TABLE

COPY, PRODUCT = 4.27, 750.0


@pytest.mark.parametrize(
    ("op", "sizes", "phase", "ms"),
    [
        ("rms_norm", (16384, 4096), "forward", 0.063),
        ("rms_norm", (16384, 4096), "backward", 0.094),
        ("rms_norm", (8192, 16384), "backward", 0.188),
        ("rms_norm", (524288, 128), "backward", 0.094),
        ("fused_add_rms_norm", (16384, 4096), "forward", 0.126),
        ("fused_add_rms_norm", (524288, 128), "backward", 0.126),
        ("layer_norm", (8192, 16384), "forward", 0.126),
        ("layer_norm", (16384, 4096), "backward", 0.094),
        ("swiglu", (8192, 14336), "forward", 0.165),
        ("geglu", (8192, 14336), "backward", 0.275),
        ("rope", (4, 4096, 32, 8, 128), "forward", 0.079),
        ("rope", (4, 4096, 32, 8, 128), "backward", 0.079),
        ("cross_entropy", (8192, 128256), "both", 1.475),
        ("cross_entropy", (8192, 32000), "both", 0.368),
    ],
)
def test_bytes_over_the_rate_of_a_copy(op, sizes, phase, ms):
    assert Case(op, sizes).bound_ms(phase, COPY, PRODUCT) == pytest.approx(ms, abs=0.0006, rel=0.001)


def test_norms_over_heads_read_them_again():
    heads = Case("qk_norm_rope", (4, 2048, 16, 8, 128))
    elements = 4 * 2048 * (16 + 8) * 128
    assert heads.bytes("forward") == 2 * 2 * elements  # q and k once each way
    assert heads.bytes("backward") == 3 * 2 * elements  # and the inputs again


@pytest.mark.parametrize(("op", "factor"), [("fused_linear_cross_entropy", 6), ("linear_logp", 8)])
def test_products_over_their_rate(op, factor):
    n, h, v = sizes = (8192, 4096, 128256)
    case = Case(op, sizes)
    assert case.flops() == factor * n * h * v
    assert case.bytes("both") == 0
    assert case.bound_ms("both", COPY, PRODUCT) == pytest.approx(factor * n * h * v / 750e12 * 1e3)


def test_ignored_tokens_are_in_no_product():
    sizes = (8192, 4096, 128256)
    half = Case("fused_linear_cross_entropy", sizes, ignored=0.5)
    assert 2 * half.flops() == Case("fused_linear_cross_entropy", sizes).flops()
    assert half.ignored_tokens == 4096


def test_both_is_forward_and_backward():
    case = Case("layer_norm", (32, 64))
    assert case.bytes("both") == case.bytes("forward") + case.bytes("backward") == 10 * 32 * 64


def test_names_say_sizes_and_what_is_special():
    assert Case("rms_norm", (3, 5)).name == "rms_norm 3x5"
    assert Case("linear_logp", (3, 5, 7)).name == "linear_logp N3 H5 V7"
    special = Case("fused_linear_cross_entropy", (3, 5, 7), softcap=30.0, ignored=0.5, slab_rows=8)
    assert special.variant == "softcap 30, 50% ignored, budget for 8 rows"


@pytest.mark.parametrize(("op", "sizes"), [("rms_norm", (3,)), ("rms_norm", (1, 2, 3)), ("norm", (1, 2))])
def test_what_is_no_case_raises(op, sizes):
    with pytest.raises(ValueError, match="is not measured at"):
        Case(op, sizes)


def test_tiny_cases_are_tiny_and_keep_what_is_special():
    for row in TABLE:
        case, small = row.case, row.case.tiny()
        assert all(small.size(name) <= min(TINY[name], case.size(name)) for name in NAMES[case.op])
        assert (small.op, small.in_place, small.turned, small.ignored) == (
            case.op,
            case.in_place,
            case.turned,
            case.ignored,
        )
        assert bool(small.slab_rows) is bool(case.slab_rows)


def test_losses_are_not_captured():
    assert {row.case.op for row in TABLE if not row.case.capturable} == {
        "cross_entropy",
        "fused_linear_cross_entropy",
        "linear_logp",
    }
