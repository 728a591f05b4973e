"""``linear_sequence_loss`` in the interpreter, beyond conformance: gradients scaled where they lie, or not at all."""

from __future__ import annotations

import pytest
import torch

from liger_registry import Device
from liger_registry.kernels.group_scale import backward_scale_unless_one

DEVICE = Device.parse("interpreter")
CONFIG = {"block": 2048, "num_warps": 4, "programs_per_unit": 4}


def held(dtype, tokens=37, hidden=24, vocab=131):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(dtype) for shape in ((tokens, hidden), (vocab, hidden), (vocab,))
    ]


def scale(factor, grads, needs=(True, True, True), bias=True, tokens=37):
    dtype = next((g.dtype for g in grads if g is not None), torch.float32)
    hidden, weight, offset = held(dtype, tokens)
    target, constants = torch.zeros(len(hidden), dtype=torch.int64), torch.zeros(len(hidden), 3)
    told = {
        "function": "",
        "settings": "{}",
        "ways": 1,
        "length": 1,
        "softcap": 0.0,
        "scale": 1.0,
        "ignore_index": -100,
    }
    inputs = (hidden, weight, target, constants, offset if bias else None)
    return backward_scale_unless_one(factor, None, *inputs, *grads, device=DEVICE, needs=needs, **CONFIG, **told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_scaled_in_fp32_where_they_lie(dtype):
    grads = held(dtype)
    before = [g.clone() for g in grads]
    found = scale(torch.tensor(1 / 3), grads)
    for mine, mother, old in zip(found, grads, before, strict=True):
        assert mine is mother
        assert torch.equal(mine, (old.float() * torch.tensor(1 / 3)).to(dtype))


def test_a_factor_of_1_writes_nothing():
    """Not even what scaling would change: a number that is none stays what it is, bit for bit."""
    grads = held(torch.bfloat16)
    grads[1][3, 4] = torch.nan
    before = [g.view(torch.int16).clone() for g in grads]
    found = scale(torch.tensor(1.0), grads)
    assert all(a is b and torch.equal(a.view(torch.int16), c) for a, b, c in zip(found, grads, before, strict=True))


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_is_needed_is_given(needs):
    grads = held(torch.float32)
    found = scale(torch.tensor(2.0), [g if need else None for g, need in zip(grads, needs, strict=True)], needs)
    assert tuple(g is not None for g in found) == needs


def test_no_bias_and_no_tokens():
    found = scale(torch.tensor(2.0), [*held(torch.float32, tokens=0)[:2], None], (True, True, True), False, 0)
    assert found[0].shape == (0, 24)
    assert found[2] is None
