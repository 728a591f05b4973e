"""``group_norm`` in Triton for few and large groups: several programs share one.

What they have to know of each other goes through small tensors between launches: no atomics and no counters, so results
have the same bits every time, on any stream and in graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import allocate_like, dense_vector
from liger_registry.kernels._spatial import walk
from liger_registry.kernels.group_norm import allocate, options_for, sizes_of, summed
from liger_registry.kernels.group_norm_device import differentiate, moments, normalise, rooted, row_sums, tile_of
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

# Channels whose sums are added at a time.
_BLOCK_SUMS = 256


@triton.jit(do_not_specialize=["spatial", "inner"])
def _moments(
    X,
    PARTS,
    spatial,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
    inner=None,
    xn=None,
    xc=None,
    x0=None,
    x1=None,
):
    SIZE: tl.constexpr = CHANNELS // GROUPS
    spatial = spatial * UNIT
    group, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    count, mean, spread = moments(
        X, group // GROUPS, group % GROUPS * SIZE, part, SPLITS, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, 1,
        DIMS, inner, xn, xc, x0, x1,
    )  # fmt: skip
    into = PARTS + tl.cast(group, tl.int64) * (3 * SPLITS) + part
    tl.store(into, count)
    tl.store(into + SPLITS, mean)
    tl.store(into + 2 * SPLITS, spread)


@triton.jit(do_not_specialize=["spatial", "inner"])
def _normalise(
    X,
    W,
    B,
    PARTS,
    Y,
    MEAN,
    RSTD,
    spatial,
    eps,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
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
    group, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    n, first = group // GROUPS, group % GROUPS * SIZE
    parts = PARTS + tl.cast(group, tl.int64) * (3 * SPLITS) + tl.arange(0, SPLITS)
    counts, means = tl.load(parts), tl.load(parts + SPLITS)
    count = tl.sum(counts, 0)
    mean = tl.div_rn(tl.sum(counts * means, 0), count)
    away = means - mean
    rstd = rooted(tl.sum(tl.load(parts + 2 * SPLITS) + counts * away * away, 0), count, eps)
    tl.store(MEAN + group, mean, mask=part == 0)
    tl.store(RSTD + group, rstd, mask=part == 0)
    across = tl.cdiv(spatial, BLOCK)
    for tile in range(part, tl.cdiv(SIZE, BLOCK_CHANNELS) * across, SPLITS):
        x_at, y_at, channel, mask = tile_of(
            n, first, tile // across, tile % across, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn,
            xc, x0, x1, yn, yc, y0, y1,
        )  # fmt: skip
        x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
        y = normalise(x - mean, rstd, W, B, channel, channel < first + SIZE)
        tl.store(Y + y_at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _row_of(CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, SPLITS: tl.constexpr):
    """Sample, row of tiles of all channels, and part of the positions that this program works on."""
    ROWS: tl.constexpr = (CHANNELS + BLOCK_CHANNELS - 1) // BLOCK_CHANNELS
    row = tl.program_id(0) // SPLITS
    return row // ROWS, row % ROWS, tl.program_id(0) % SPLITS


@triton.jit(do_not_specialize=["batch", "spatial", "inner"])
def _channel_sums(
    DY,
    X,
    MEAN,
    RSTD,
    SUMS,
    batch,
    spatial,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
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
):
    spatial = spatial * UNIT
    n, down, part = _row_of(CHANNELS, BLOCK_CHANNELS, SPLITS)
    channel = down * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = channel < CHANNELS
    group = n * GROUPS + channel // (CHANNELS // GROUPS)
    mean = tl.load(MEAN + group, mask=inside, other=0.0)[:, None]
    rstd = tl.load(RSTD + group, mask=inside, other=0.0)[:, None]
    dots, sums = row_sums(
        DY, X, n, 0, down, part, SPLITS, mean, rstd, spatial, CHANNELS, CHANNELS, BLOCK_CHANNELS, BLOCK, 1, DIMS,
        inner, dyn, dyc, dy0, dy1, xn, xc, x0, x1,
    )  # fmt: skip
    into = SUMS + (tl.cast(n, tl.int64) * SPLITS + part) * CHANNELS + channel
    tl.store(into, dots, mask=inside)
    tl.store(into + tl.cast(batch, tl.int64) * (SPLITS * CHANNELS), sums, mask=inside)


@triton.jit(do_not_specialize=["batch", "spatial"])
def _group_means(
    SUMS,
    W,
    MEANS,
    batch,
    spatial,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    SIZE: tl.constexpr = CHANNELS // GROUPS
    n, first = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * SIZE
    part = tl.arange(0, SPLITS)
    slope = tl.cast(0.0, tl.float32)
    shift = tl.cast(0.0, tl.float32)
    for start in range(0, SIZE, BLOCK):
        channel = first + start + tl.arange(0, BLOCK)
        inside = channel < first + SIZE
        at = SUMS + (tl.cast(n, tl.int64) * SPLITS + part)[:, None] * CHANNELS + channel[None, :]
        dots = tl.sum(tl.load(at, mask=inside[None, :], other=0.0), 0)
        at += tl.cast(batch, tl.int64) * (SPLITS * CHANNELS)
        sums = tl.sum(tl.load(at, mask=inside[None, :], other=0.0), 0)
        if W is not None:
            w = tl.load(W + channel, mask=inside, other=0.0).to(tl.float32)
            dots, sums = dots * w, sums * w
        slope += tl.sum(dots, 0)
        shift += tl.sum(sums, 0)
    count = tl.cast(spatial * UNIT * SIZE, tl.float32)
    into = MEANS + tl.cast(tl.program_id(0), tl.int64) * 2
    tl.store(into, shift / count)
    tl.store(into + 1, slope / count)


@triton.jit(do_not_specialize=["spatial", "inner"])
def _differentiate(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    MEANS,
    DX,
    spatial,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
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
    spatial = spatial * UNIT
    n, down, part = _row_of(CHANNELS, BLOCK_CHANNELS, SPLITS)
    channel = down * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = channel < CHANNELS
    group = n * GROUPS + channel // (CHANNELS // GROUPS)
    mean = tl.load(MEAN + group, mask=inside, other=0.0)[:, None]
    rstd = tl.load(RSTD + group, mask=inside, other=0.0)[:, None]
    shift = tl.load(MEANS + group * 2, mask=inside, other=0.0)[:, None]
    slope = tl.load(MEANS + group * 2 + 1, mask=inside, other=0.0)[:, None]
    if W is not None:
        w = tl.load(W + channel, mask=inside, other=0.0).to(tl.float32)[:, None]
    for right in range(part, tl.cdiv(spatial, BLOCK), SPLITS):
        x_at, dy_at, _, mask = tile_of(
            n, 0, down, right, spatial, CHANNELS, CHANNELS, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1, dyn,
            dyc, dy0, dy1,
        )  # fmt: skip
        x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
        if W is not None:
            dy *= w
        dx = differentiate(dy, (x - mean) * rstd, rstd, shift, slope)
        _, dx_at, _, _ = tile_of(
            n, 0, down, right, spatial, CHANNELS, CHANNELS, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1, dxn,
            dxc, dx0, dx1,
        )  # fmt: skip
        tl.store(DX + dx_at, dx.to(DX.dtype.element_ty), mask=mask)


def forward_split(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, groups: int, eps: float, splits: int,
    block: int, block_rows: int, num_warps: int, waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Moments of the groups in ``splits`` parts, tiles in turn, and the result in a second launch."""
    y, mean, rstd = allocate(x, groups)
    (source,), target, dims, strides = walk((x,), y)
    spatial, sizes = sizes_of(x, groups)
    sizes |= {"BLOCK_CHANNELS": block_rows, "BLOCK": block, "SPLITS": splits, "DIMS": dims}
    options = options_for(num_warps, waves_per_eu)
    parts = mean.new_empty((mean.numel(), 3, splits))
    grid = (mean.numel() * splits,)
    launch(_moments, grid, source, parts, spatial, *strides[:5], **sizes, **options)
    arguments = source, dense_vector(weight), dense_vector(bias), parts, target, mean, rstd, spatial, eps, *strides
    launch(_normalise, grid, *arguments, **sizes, **options)
    return y if target is y or target is None else y.copy_(target), mean, rstd


def backward_split(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, device: Device,
    needs: tuple[bool, bool, bool], groups: int, eps: float, splits: int, block: int, block_rows: int, num_warps: int,
    waves_per_eu: int | None = None,
) -> Gradients:  # fmt: skip
    """Sums of each channel in ``splits`` parts, blocks in turn; then those of each group; then the gradient of x."""
    needs_weight, needs_bias = needs[1] and weight is not None, needs[2] and bias is not None
    dx = allocate_like(x) if needs[0] else None
    if dx is None and not needs_weight and not needs_bias:
        return None, None, None
    sources, target, dims, strides = walk((dy, x), dx)
    spatial, sizes = sizes_of(x, groups)
    mean, rstd = (t if t.is_contiguous() else t.contiguous() for t in (mean, rstd))
    batch, channels = x.shape[:2]
    tile = {"BLOCK_CHANNELS": block_rows, "BLOCK": block, "DIMS": dims}
    options = options_for(num_warps, waves_per_eu)
    sums = x.new_empty((2, batch * splits, channels), dtype=torch.float32)
    grid = (batch * -(-channels // block_rows) * splits,)
    arguments = *sources, mean, rstd, sums, batch, spatial, *strides[:9]
    launch(_channel_sums, grid, *arguments, **sizes, **tile, SPLITS=splits, **options)
    if target is not None:
        vector = dense_vector(weight)
        means = mean.new_empty((mean.numel(), 2))
        both = {**sizes, "BLOCK": min(_BLOCK_SUMS, 1 << (channels // groups - 1).bit_length()), "SPLITS": splits}
        launch(_group_means, (mean.numel(),), sums, vector, means, batch, spatial, **both, num_warps=4)
        arguments = *sources, vector, mean, rstd, means, target, spatial, *strides
        launch(_differentiate, grid, *arguments, **sizes, **tile, SPLITS=splits, **options)
    dx = dx if dx is None or target is dx or target is None else dx.copy_(target)
    dweight = summed(sums[0], weight) if needs_weight else None
    return dx, dweight, summed(sums[1], bias) if needs_bias else None
