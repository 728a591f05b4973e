"""The Triton implementations of softmax in Triton's interpreter, for what the conformance suite does not cover."""

from __future__ import annotations

import numpy
import pytest
import torch

from liger_registry import Device
from liger_registry.examples import fill
from liger_registry.kernels import softmax, softmax_split

DEVICE = Device.parse("interpreter")
INF = float("inf")
FORWARD = {
    "multi_row": (softmax.forward_multi_row, {"block_rows": 4, "num_warps": 4}),
    "multi_row_ahead": (
        softmax.forward_multi_row,
        {"block_rows": 2, "num_warps": 4, "programs_per_unit": 1, "num_stages": 2},
    ),
    "online": (softmax.forward_online, {"block": 16, "num_warps": 4}),
    "column_split": (softmax_split.forward_column_split, {"splits": 2, "block": 16, "num_warps": 4}),
}
BACKWARD = {
    "multi_row": (softmax.backward_multi_row, {"block_rows": 4, "num_warps": 4}),
    "multi_row_ahead": (
        softmax.backward_multi_row,
        {"block_rows": 2, "num_warps": 4, "programs_per_unit": 1, "num_stages": 2},
    ),
    "two_pass": (softmax.backward_two_pass, {"block": 16, "num_warps": 4}),
    "column_split": (softmax_split.backward_column_split, {"splits": 2, "block": 16, "num_warps": 4}),
}


def forward(name, x):
    function, config = FORWARD[name]
    (y,) = function(x, device=DEVICE, **config)
    return y


def backward(name, dy, y, needs=(True,)):
    function, config = BACKWARD[name]
    (dx,) = function(dy, y, device=DEVICE, needs=needs, **config)
    return dx


@pytest.mark.parametrize("name", FORWARD)
def test_minus_infinity_and_what_is_no_number_give_what_torch_gives(name):
    x = torch.randn(8, 40)
    x[0] = -INF
    x[1, :20] = -INF  # the first block of a loop, the first part of a split
    x[2, 16:] = -INF
    x[3, ::2] = -INF
    x[4, 39] = INF
    x[5, 3] = float("nan")
    x[6] = 0.0
    x[7, 5] = 3e38
    with numpy.errstate(invalid="ignore"):  # the interpreter's own, of inf - inf
        y = forward(name, x)
    torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True, rtol=1e-6, atol=1e-7)
    assert (y[1, :20] == 0).all()
    assert (y[7] == (torch.arange(40) == 5)).all()


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_masked_rows_are_those_of_torch(name):
    x = torch.randn(4, 40)
    x[0], x[1, :20] = -INF, -INF
    y, dy = torch.softmax(x, -1), torch.randn(4, 40)
    right = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)
    dx = backward(name, dy, y)
    torch.testing.assert_close(dx, right, equal_nan=True, rtol=1e-5, atol=1e-7)
    assert (dx[1, :20] == 0).all()


@pytest.mark.parametrize("name", FORWARD)
def test_maxima_that_grow_from_block_to_block(name):
    x = torch.arange(40.0).repeat(2, 1) * torch.tensor([[3.0], [-3.0]])
    torch.testing.assert_close(forward(name, x).double(), torch.softmax(x.double(), -1), rtol=2e-6, atol=1e-38)


def views():
    def made(*shape):
        return fill(shape, torch.bfloat16, "cpu", 0)

    return {
        "heads": made(2, 5, 3, 24).transpose(1, 2),
        "columns": made(24, 6).t(),
        "slice": made(6, 40)[:, 3:27],
        "slice_of_batches": made(3, 4, 40)[1:, ::2, 3:27],
        "expanded": made(1, 24).expand(7, 24),
        "six": made(2, 1, 2, 2, 3, 2, 24).permute(5, 3, 0, 4, 2, 1, 6),
        "vector": made(24),
        "one_column": made(5, 8)[:, :1],
    }


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("pair", [("multi_row_ahead", "multi_row"), ("online", "two_pass"), ("column_split",) * 2])
def test_layouts(pair, name):
    x = views()[name]
    if pair[0] == "column_split" and x.shape[-1] < 17:
        x = x.expand(*x.shape[:-1], 24)
    empty = torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype)
    right = torch.softmax(x.double(), -1)
    for dy in (
        torch.ones((), dtype=x.dtype).expand(x.shape),
        fill((24, *x.shape[:-1]), x.dtype, "cpu", 3).movedim(0, -1),
    ):
        dy = dy[..., : x.shape[-1]]
        y = forward(pair[0], x)
        assert y.stride() == empty.stride()
        torch.testing.assert_close(y.double(), right, rtol=4e-3, atol=1e-9)
        dx = backward(pair[1], dy, y)
        exact = y.double() * (dy - (dy * y.double()).sum(-1, keepdim=True))
        torch.testing.assert_close(dx.double(), exact, rtol=4e-3, atol=1e-6)
        assert dx.stride() == empty.stride()


def test_views_are_read_through_their_strides(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, **options: copies.append(self.shape))
    x = views()["slice_of_batches"]
    for name in FORWARD:
        forward(name, x)
    y = torch.softmax(x, -1)
    for name in BACKWARD:
        backward(name, torch.ones((), dtype=x.dtype).expand(x.shape), y)
    assert copies == []


@pytest.mark.parametrize("width", [70000, 131072 + 5])
def test_rows_wider_than_a_program_holds(width):
    x = fill((1, width), torch.bfloat16, "cpu", 0, "tail")
    dy = fill((1, width), torch.bfloat16, "cpu", 1)
    right = torch.softmax(x, -1)
    block = {"block": 8192, "num_warps": 8}
    for forwards, backwards, config in (
        (softmax.forward_online, softmax.backward_two_pass, block),
        (softmax_split.forward_column_split, softmax_split.backward_column_split, {**block, "splits": 4}),
    ):
        (y,) = forwards(x, device=DEVICE, **config)
        torch.testing.assert_close(y, right, rtol=8e-3, atol=0)
        (dx,) = backwards(dy, y, device=DEVICE, needs=(True,), **config)
        exact = y.double() * (dy - (dy.double() * y).sum(-1, keepdim=True))
        torch.testing.assert_close(dx.double(), exact, rtol=4e-3, atol=1e-9)


@pytest.mark.parametrize("name", BACKWARD)
def test_nothing_is_computed_that_is_not_needed(name):
    y = torch.softmax(torch.randn(3, 40), -1)
    assert backward(name, y, y, needs=(False,)) is None
    assert backward(name, y[:0], y[:0]).shape == (0, 40)
