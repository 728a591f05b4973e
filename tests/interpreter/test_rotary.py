"""The Triton implementations of rope and qk_norm_rope in Triton's interpreter, beyond the conformance suite."""

from __future__ import annotations

import pytest
import torch

from liger_registry import Device
from liger_registry.kernels import qk_norm_rope, rope
from liger_registry.ops.qk_norm_rope import OP as NORM
from liger_registry.ops.rope import OP as ROPE

DEVICE = Device.parse("interpreter")
NAMES = ("tokens", "heads")
# Half the layouts for each: what they share is tested once.
LAYOUTS = {"tokens": ("heads", "projection"), "heads": ("model", "transposed")}
TILE = {"block": 2, "block_rows": 8, "num_warps": 4}
FLAGS = [
    {},
    {"interleaved": True, "half": True},
    {"interleaved": True, "half": True, "deinterleave": True},
    {"interleaved": True, "wide": True},
]


def defaults(op, **options):
    return {**{o.name: o.default for o in op.options}, **options}


def heads(count, layout, dtype=torch.bfloat16, width=20, tokens=7):
    """(2, count, tokens, width) in a layout: as models have it, by heads, out of one projection, or transposed."""
    x = torch.randn(2, tokens, count, width).to(dtype)
    if layout == "projection":
        wide = torch.randn(2, tokens, (count + 3) * width).to(dtype)
        wide[..., width : (count + 1) * width] = x.flatten(-2)
        return wide[..., width : (count + 1) * width].view(2, tokens, count, width).transpose(1, 2)
    by_heads = x.transpose(1, 2)
    if layout == "model":
        return by_heads
    return by_heads.contiguous() if layout == "heads" else by_heads.mT.contiguous().mT


def tables(columns, tokens=7, dtype=torch.bfloat16):
    angles = torch.randn(2, tokens, columns)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_rope_is_the_eager_formula_bit_for_bit_in_every_layout(flags, name):
    options = defaults(ROPE, **flags)
    cos, sin = tables(6 if options["half"] else 12)
    for layout in LAYOUTS[name]:
        q, k = heads(3, layout), heads(2, layout)
        right = ROPE.schemes[0].reference(q, k, cos, sin, **options)
        found = getattr(rope, f"forward_{name}")(q, k, cos, sin, device=DEVICE, **options, **TILE)
        for a, b in zip(found, right, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        grads = heads(3, layout), heads(2, layout)
        right = ROPE.schemes[0].backward(*grads, cos, sin, right[2], needs=(True, True), **options)
        backward = getattr(rope, f"backward_{name}")
        found = backward(*grads, cos, sin, q.new_empty(2, 0), device=DEVICE, needs=(True, True), **options, **TILE)
        for a, b, g in zip(found, right, grads, strict=True):
            assert torch.equal(a, b)
            assert g.stride(-1) != 1 or layout == "projection" or a.stride() == g.stride()


@pytest.mark.parametrize("name", NAMES)
def test_rope_turns_only_what_is_needed(name):
    options = defaults(ROPE)
    cos, sin = tables(12)
    grads = heads(3, "heads"), heads(2, "model")
    backward = getattr(rope, f"backward_{name}")
    narrow = cos.new_empty(2, 0)
    every = backward(*grads, cos, sin, narrow, device=DEVICE, needs=(True, True), **options, **TILE)
    for needs in ((True, False), (False, True), (False, False)):
        found = backward(*grads, cos, sin, narrow, device=DEVICE, needs=needs, **options, **TILE)
        for a, b, need in zip(found, every, needs, strict=True):
            assert (a is None) != need
            assert not need or torch.equal(a, b)
    alone = getattr(rope, f"forward_{name}")(grads[1], None, cos, sin, device=DEVICE, **options, **TILE)
    assert alone[1].shape == (2, 0, 7, 20)
    assert torch.equal(alone[0], ROPE.reference(grads[1], None, cos, sin)[0])


@pytest.mark.parametrize("name", NAMES)
def test_norm_and_rotation_round_as_the_model_does(name):
    options = defaults(NORM, offset=0.5)
    cos, sin = tables(12)
    q_weight, k_weight = torch.randn(2, 20).bfloat16()
    for layout in LAYOUTS[name]:
        inputs = heads(3, layout), heads(2, layout), q_weight, k_weight, cos, sin
        right = NORM.schemes[0].reference(*inputs, **options)
        found = getattr(qk_norm_rope, f"forward_{name}")(*inputs, device=DEVICE, **options, **TILE)
        for a, b in zip(found[:2], right[:2], strict=True):
            # The sum of squares may differ in its last bit, and then some element in its own.
            assert (a != b).float().mean() < 0.01
            assert a.stride() == b.stride()
        torch.testing.assert_close(found[2], right[2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_norm_are_those_that_are_needed(name):
    options = defaults(NORM)
    inputs = heads(3, "model"), heads(2, "model"), *torch.randn(2, 20).bfloat16(), *tables(12)
    saved = NORM.schemes[0].reference(*inputs, **options)[2:]
    grads = heads(3, "heads"), heads(2, "transposed")
    backward = getattr(qk_norm_rope, f"backward_{name}")
    config = {"device": DEVICE, "programs_per_unit": 1, **options, **TILE}
    every = backward(*grads, *inputs, *saved, needs=(True,) * 4, **config)
    for needs in ((True, False, False, False), (False, True, False, True), (False, False, True, False), (False,) * 4):
        found = backward(*grads, *inputs, *saved, needs=needs, **config)
        for a, b, need in zip(found, every, needs, strict=True):
            assert (a is None) != need
            assert not need or torch.equal(a, b)
