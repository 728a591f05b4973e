"""What the kernels of ``group_norm`` share: tiles of channels by positions, and the sums over them."""

from __future__ import annotations

import triton
import triton.language as tl

from liger_registry.kernels._spatial import channel_offsets, position_offsets


@triton.jit
def tile_of(
    n,
    first,
    down,
    right,
    spatial,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    inner,
    an,
    ac,
    a0,
    a1,
    bn,
    bc,
    b0,
    b1,
):
    """Where a tile lies in two tensors, its channels, and which elements exist.

    The tile is the one ``down`` and ``right`` among those of the ``SIZE`` channels from ``first`` on of sample ``n``.
    """
    channel = first + down * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    position = right * BLOCK + tl.arange(0, BLOCK)
    mask = (channel < first + SIZE)[:, None] & (position < spatial)[None, :]
    a_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, an, ac)[:, None]
    a_at += position_offsets(position, DIMS, inner, a0, a1)[None, :]
    b_at = channel_offsets(n, channel, spatial, CHANNELS, DIMS, bn, bc)[:, None]
    b_at += position_offsets(position, DIMS, inner, b0, b1)[None, :]
    return a_at, b_at, channel, mask


@triton.jit
def rooted(spread, count, eps):
    """1 / sqrt(variance + eps), correctly rounded at each step: once a group, so exactness is free."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(spread, count) + tl.cast(eps, tl.float32)))


@triton.jit
def normalise(centred, rstd, W, B, channel, inside):
    """The result in fp32 from the centred x."""
    y = centred * rstd
    if W is not None:
        y *= tl.load(W + channel, mask=inside, other=0.0).to(tl.float32)[:, None]
    if B is not None:
        y += tl.load(B + channel, mask=inside, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def differentiate(dy, normed, rstd, shift, slope):
    """The gradient of x in fp32; ``dy`` times the weight, and the means of it and of its product with ``normed``."""
    return (dy - shift - normed * slope) * rstd


@triton.jit
def moments(
    X,
    n,
    first,
    start,
    step,
    spatial,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    inner,
    xn,
    xc,
    x0,
    x1,
):
    """Count, mean, and sum of squared distances from it, over every ``step``-th tile of a group from ``start`` on.

    Each tile is centred by its own mean and then joined with what was there (Chan, Golub and LeVeque, 1979): a sum of
    squares less the square of a sum would lose all digits where the mean is 3000 standard deviations.
    """
    count = tl.cast(0.0, tl.float32)
    mean = tl.cast(0.0, tl.float32)
    spread = tl.cast(0.0, tl.float32)
    across = tl.cdiv(spatial, BLOCK)
    for tile in tl.range(start, tl.cdiv(SIZE, BLOCK_CHANNELS) * across, step, num_stages=STAGES):
        down, right = tile // across, tile % across
        x_at, _, _, mask = tile_of(
            n, first, down, right, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1, xn, xc,
            x0, x1,
        )  # fmt: skip
        x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
        rows = tl.minimum(SIZE - down * BLOCK_CHANNELS, BLOCK_CHANNELS)
        here = tl.cast(rows * tl.minimum(spatial - right * BLOCK, BLOCK), tl.float32)
        middle = tl.sum(tl.sum(x, 1), 0) / here
        centred = tl.where(mask, x - middle, 0.0)
        share = here / (count + here)
        away = middle - mean
        spread += tl.sum(tl.sum(centred * centred, 1), 0) + away * away * (count * share)
        mean += away * share
        count += here
    return count, mean, spread


@triton.jit
def row_sums(
    DY,
    X,
    n,
    first,
    down,
    start,
    step,
    mean,
    rstd,
    spatial,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    inner,
    dyn,
    dyc,
    dy0,
    dy1,
    xn,
    xc,
    x0,
    x1,
):
    """For each channel of a row of tiles the sums of ``dy`` times the normalised x, and of ``dy``.

    Over every ``step``-th block of positions from ``start`` on; ``mean`` and ``rstd`` are numbers, or columns.
    """
    dots = tl.zeros([BLOCK_CHANNELS, BLOCK], tl.float32)
    sums = tl.zeros([BLOCK_CHANNELS, BLOCK], tl.float32)
    for right in tl.range(start, tl.cdiv(spatial, BLOCK), step, num_stages=STAGES):
        x_at, dy_at, _, mask = tile_of(
            n, first, down, right, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1, dyn,
            dyc, dy0, dy1,
        )  # fmt: skip
        x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
        dots += dy * ((x - mean) * rstd)
        sums += dy
    return tl.sum(dots, 1), tl.sum(sums, 1)
