"""Inputs of each style put their weight where they say."""

from __future__ import annotations

import pytest
import torch

from liger_registry.examples import STYLES, fill


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4), (9,), (1, 1), (0, 4)])
def test_shape_dtype_and_repeatability(style, dtype, shape):
    one, two = (fill(shape, dtype, "cpu", 3, style) for _ in range(2))
    assert one.shape == shape
    assert one.dtype == dtype
    assert torch.equal(one, two)
    assert one.isfinite().all()
    assert fill(shape, dtype, "meta", 3, style).is_meta


def test_seeds_differ():
    assert not torch.equal(fill((64,), torch.float32, "cpu", 1), fill((64,), torch.float32, "cpu", 2))


def test_the_callers_generator_is_not_touched():
    before = torch.get_rng_state()
    fill((8, 8), torch.float32, "cpu", 1, "spike")
    assert torch.equal(torch.get_rng_state(), before)


def test_styles():
    shape = (64, 64)
    random = fill(shape, torch.float32, "cpu", 1)
    assert abs(random.mean()) < 0.1
    assert abs(random.std() - 1) < 0.1
    tail = fill(shape, torch.float32, "cpu", 1, "tail")
    assert torch.equal(tail[:-1, :-1], random[:-1, :-1])
    assert torch.equal(tail[:-1, -1], 32 * random[:-1, -1])
    assert torch.equal(tail[-1, :-1], 32 * random[-1, :-1])
    spike = fill(shape, torch.float32, "cpu", 1, "spike")
    assert ((spike == 256).sum(-1) == 1).all()
    assert fill(shape, torch.float32, "cpu", 1, "tiny").abs().max() < 1e-2
    assert abs(fill(shape, torch.float32, "cpu", 1, "shifted").mean() - 4) < 0.1
    zeros = fill(shape, torch.float32, "cpu", 1, "zeros")
    assert (zeros[::2] == 0).all()
    assert (zeros[1::2] != 0).all()
    assert torch.equal(fill(shape, torch.float32, "cpu", 1, scale=0.5), random * 0.5)


def test_an_unknown_style():
    with pytest.raises(ValueError, match="no style 'odd'"):
        fill((4,), torch.float32, "cpu", 0, "odd")
