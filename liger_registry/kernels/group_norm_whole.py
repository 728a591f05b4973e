"""``group_norm`` in Triton for groups that registers hold: x is read once, and so is dy.

Launch functions are those of ``group_norm``. A program has ``block_rows`` groups, neighbours in memory; a tile has the
channels of all of them as its rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._spatial import channel_offsets, position_offsets
from liger_registry.kernels.group_norm import options_for, run_backward, run_forward
from liger_registry.kernels.group_norm_device import differentiate, normalise, rooted

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit
def _rows(total, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Sample and channel of each row of this program's tile, and which rows there are."""
    index = tl.arange(0, BLOCK_GROUPS * BLOCK_CHANNELS)
    group = tl.program_id(0) * BLOCK_GROUPS + index // BLOCK_CHANNELS
    inside = (index % BLOCK_CHANNELS < SIZE) & (group < total)
    return group // GROUPS, group % GROUPS * SIZE + index % BLOCK_CHANNELS, inside


@triton.jit
def _by_group(rows, BLOCK_GROUPS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """The sums of the rows of each group."""
    return tl.sum(tl.reshape(rows, [BLOCK_GROUPS, BLOCK_CHANNELS]), 1)


@triton.jit
def _by_row(groups, BLOCK_GROUPS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """The value of its group for each row, as a column."""
    wide = tl.broadcast_to(groups[:, None], [BLOCK_GROUPS, BLOCK_CHANNELS])
    return tl.reshape(wide, [BLOCK_GROUPS * BLOCK_CHANNELS])[:, None]


@triton.jit(do_not_specialize=["total", "spatial", "inner"])
def _forward_whole(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    total,
    spatial,
    eps,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    inner=None,
    xn=None,
    xc=None,
    x0=None,
    x1=None,
    yn=None,
    yc=None,
    y0=None,
    y1=None,
):
    SIZE: tl.constexpr = CHANNELS // GROUPS
    spatial = spatial * UNIT
    n, channel, inside = _rows(total, GROUPS, SIZE, BLOCK_GROUPS, BLOCK_CHANNELS)
    position = tl.arange(0, BLOCK)
    mask = inside[:, None] & (position < spatial)[None, :]
    x_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, xn, xc)[:, None]
    x_at += position_offsets(position, DIMS, inner, x0, x1)[None, :]
    x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
    count = tl.cast(spatial * SIZE, tl.float32)
    mean = _by_group(tl.sum(x, 1), BLOCK_GROUPS, BLOCK_CHANNELS)
    mean = tl.div_rn(mean, tl.zeros([BLOCK_GROUPS], tl.float32) + count)
    centred = tl.where(mask, x - _by_row(mean, BLOCK_GROUPS, BLOCK_CHANNELS), 0.0)
    spread = _by_group(tl.sum(centred * centred, 1), BLOCK_GROUPS, BLOCK_CHANNELS)
    rstd = rooted(spread, tl.zeros([BLOCK_GROUPS], tl.float32) + count, eps)
    group = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    tl.store(MEAN + group, mean, mask=group < total)
    tl.store(RSTD + group, rstd, mask=group < total)
    y = normalise(centred, _by_row(rstd, BLOCK_GROUPS, BLOCK_CHANNELS), W, B, channel, inside)
    y_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, yn, yc)[:, None]
    y_at += position_offsets(position, DIMS, inner, y0, y1)[None, :]
    tl.store(Y + y_at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total", "spatial", "inner"])
def _backward_whole(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    DW,
    DB,
    total,
    spatial,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    inner=None,
    dyn=None,
    dyc=None,
    dy0=None,
    dy1=None,
    xn=None,
    xc=None,
    x0=None,
    x1=None,
    dxn=None,
    dxc=None,
    dx0=None,
    dx1=None,
):
    SIZE: tl.constexpr = CHANNELS // GROUPS
    spatial = spatial * UNIT
    n, channel, inside = _rows(total, GROUPS, SIZE, BLOCK_GROUPS, BLOCK_CHANNELS)
    position = tl.arange(0, BLOCK)
    mask = inside[:, None] & (position < spatial)[None, :]
    x_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, xn, xc)[:, None]
    x_at += position_offsets(position, DIMS, inner, x0, x1)[None, :]
    dy_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, dyn, dyc)[:, None]
    dy_at += position_offsets(position, DIMS, inner, dy0, dy1)[None, :]
    x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
    group = n * GROUPS + channel // SIZE
    rstd = tl.load(RSTD + group, mask=inside, other=0.0)[:, None]
    normed = (x - tl.load(MEAN + group, mask=inside, other=0.0)[:, None]) * rstd
    dots, sums = tl.sum(dy * normed, 1), tl.sum(dy, 1)
    at = tl.cast(n, tl.int64) * CHANNELS + channel
    if DW is not None:
        tl.store(DW + at, dots, mask=inside)
    if DB is not None:
        tl.store(DB + at, sums, mask=inside)
    if DX is not None:
        if W is not None:
            w = tl.load(W + channel, mask=inside, other=0.0).to(tl.float32)
            dots, sums, dy = dots * w, sums * w, dy * w[:, None]
        count = tl.cast(spatial * SIZE, tl.float32)
        shift = _by_row(_by_group(sums, BLOCK_GROUPS, BLOCK_CHANNELS) / count, BLOCK_GROUPS, BLOCK_CHANNELS)
        slope = _by_row(_by_group(dots, BLOCK_GROUPS, BLOCK_CHANNELS) / count, BLOCK_GROUPS, BLOCK_CHANNELS)
        dx = differentiate(dy, normed, rstd, shift, slope)
        dx_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, dxn, dxc)[:, None]
        dx_at += position_offsets(position, DIMS, inner, dx0, dx1)[None, :]
        tl.store(DX + dx_at, dx.to(DX.dtype.element_ty), mask=mask)


def _tile(x: Tensor, groups: int, block_rows: int) -> dict[str, int]:
    """The tile of ``block_rows`` groups; a channel's positions fill 16 columns at least, unless there is but one."""
    size, positions = x.shape[1] // groups, math.prod(x.shape[2:])
    block = 1 if positions == 1 else max(16, 1 << (positions - 1).bit_length())
    return {"BLOCK_GROUPS": block_rows, "BLOCK_CHANNELS": 1 << (size - 1).bit_length(), "BLOCK": block}


def forward_whole(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, groups: int, eps: float,
    block_rows: int, num_warps: int, waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``block_rows`` groups in registers."""
    options = options_for(num_warps, waves_per_eu)
    config = _tile(x, groups, block_rows)
    return run_forward(_forward_whole, x, weight, bias, groups, eps, config, options, block_rows)


def backward_whole(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, device: Device,
    needs: tuple[bool, bool, bool], groups: int, eps: float, block_rows: int, num_warps: int,
    waves_per_eu: int | None = None,
) -> Gradients:  # fmt: skip
    """``block_rows`` groups in registers."""
    options = options_for(num_warps, waves_per_eu)
    config = _tile(x, groups, block_rows)
    return run_backward(_backward_whole, dy, x, weight, bias, mean, rstd, needs, groups, config, options, block_rows)
