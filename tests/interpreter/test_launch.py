from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from liger_registry.compile import Target, compile_record
from liger_registry.errors import CompileError, InvalidInputError
from liger_registry.launch import interpreting, launch, record


@triton.jit
def scale(x, bias, y, n, factor, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr = False):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x + offsets, mask=mask) * factor
    if HAS_BIAS:
        value += tl.load(bias + offsets, mask=mask)
    tl.store(y + offsets, value, mask=mask)


def test_interpreting():
    assert interpreting()


@pytest.mark.parametrize(
    "options", [{}, {"num_warps": 4, "num_stages": 2}, {"waves_per_eu": 2, "kpack": 1, "maxnreg": 64}]
)
def test_options_of_every_vendor_are_left_out(options):
    x, y = torch.randn(100), torch.zeros(100)
    launch(scale, (2,), x, None, y, 100, 2.5, BLOCK=64, **options)
    torch.testing.assert_close(y, x * 2.5)


def test_absent_then_present_then_misaligned():
    x, y = torch.randn(101), torch.zeros(101)
    launch(scale, (2,), x[:100], None, y[:100], 100, 2.0, BLOCK=64)
    launch(scale, (2,), x[:100], x[1:], y[1:], 100, 2.0, BLOCK=64, HAS_BIAS=True)
    torch.testing.assert_close(y[1:], x[:100] * 2 + x[1:])


def test_empty_grid_and_impossible_grid():
    y = torch.zeros(4)
    launch(scale, (0,), y, None, y, 4, 2.0, BLOCK=64)
    with pytest.raises(InvalidInputError):
        launch(scale, (1, 65536), y, None, y, 4, 2.0, BLOCK=64)
    with pytest.raises(TypeError, match="no keyword 'num_warp'"):
        launch(scale, (1,), y, None, y, 4, 2.0, BLOCK=64, num_warp=4)


def test_records_but_compiles_nothing():
    x = torch.empty(64, device="meta")
    with record() as records:
        launch(scale, (1,), x, None, x, 64, 2.0, BLOCK=64)
    assert records[0].grid == (1,)
    with pytest.raises(CompileError, match="scale"):
        compile_record(records[0], Target("cuda", 90, 32))
