"""The Triton implementations of group_norm in Triton's interpreter, for what the conformance suite does not cover."""

from __future__ import annotations

import pytest
import torch

from liger_registry import Device
from liger_registry.examples import fill
from liger_registry.kernels import group_norm, group_norm_split, group_norm_whole

DEVICE = Device.parse("interpreter")
TILE = {"block": 16, "block_rows": 2, "num_warps": 4}
CONFIGS = {
    "whole": (group_norm_whole, {"block_rows": 2, "num_warps": 4}),
    "group": (group_norm, TILE),
    "split": (group_norm_split, {**TILE, "splits": 2}),
}


def run(name, x, weight, bias, dy, groups, needs=(True, True, True)):
    module, config = CONFIGS[name]
    options = {"device": DEVICE, "groups": groups, "eps": 1e-5, **config}
    y, mean, rstd = getattr(module, f"forward_{name}")(x, weight, bias, **options)
    return y, *getattr(module, f"backward_{name}")(dy, x, weight, bias, mean, rstd, needs=needs, **options)


def right(x, weight, bias, dy, groups):
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = torch.nn.functional.group_norm(leaves[0].contiguous(), groups, *leaves[1:], 1e-5)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


def views():
    image = fill((2, 6, 5, 4), torch.float32, "cpu", 0)
    return {
        "contiguous": image,
        "flat": image[:, :, 0, 0].contiguous(),
        "sound": image.reshape(2, 6, 20),
        "channels_last": image.to(memory_format=torch.channels_last),
        "cropped": image[:, :, 1:5, 1:4],
        "batches_inside": image.transpose(0, 1)[:2].expand(2, 2, 5, 4),
        "permuted_volume": image.reshape(2, 6, 5, 2, 2).permute(0, 1, 4, 2, 3)[..., ::2],
    }


@pytest.mark.parametrize("view", views())
@pytest.mark.parametrize("name", CONFIGS)
def test_layouts_and_dimensions(name, view):
    x = views()[view]
    weight, bias = fill((x.shape[1],), x.dtype, "cpu", 1) + 1, fill((x.shape[1],), x.dtype, "cpu", 2)
    dy = fill((*x.shape[:2], *x.shape[2:][::-1]), x.dtype, "cpu", 3).permute(0, 1, *range(x.dim() - 1, 1, -1))
    before = x.clone(), dy.clone()
    one = torch.ones((), dtype=x.dtype).expand(x.shape)
    for grad in (dy, one) if view == "sound" else (dy,):
        found = run(name, x, weight, bias, grad, 2)
        for mine, exact in zip(found, right(x, weight, bias, grad, 2), strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=2e-5)
        empty = torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape)
        assert found[0].stride() == empty.stride()
    assert torch.equal(before[0], x)
    assert torch.equal(before[1], dy)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mean_of_thousands_of_deviations_leaves_the_variance(name):
    x = 5000 + fill((1, 4, 37), torch.float32, "cpu", 0)
    ones, dy = torch.ones(4), x - 5000
    found, exact = (f(*a) for f, a in ((run, (name, x, ones, ones, dy, 2)), (right, (x, ones, ones, dy, 2))))
    # A rounding of the mean is 2.4e-4 of a deviation.
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_only_what_is_needed_is_computed(name):
    x, vector = fill((2, 4, 20), torch.bfloat16, "cpu", 0), fill((4,), torch.bfloat16, "cpu", 1)
    every = run(name, x, vector, vector, x, 2)[1:]
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        found = run(name, x, vector, vector, x, 2, needs)[1:]
        for gradient, need, whole in zip(found, needs, every, strict=True):
            assert torch.equal(gradient, whole) if need else gradient is None
    assert run(name, x, None, None, x, 2)[2:] == (None, None)
