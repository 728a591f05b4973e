"""``group_norm`` in Triton; formula, roundings and saved tensors are those of ``liger_registry.ops.group_norm``.

Launch functions take ``(x, weight, bias)`` with x (batch, channels, *spatial), weight and bias (channels,) or None, and
return ``(y, mean, rstd)``; backward ones take ``(dy, x, weight, bias, mean, rstd)`` and return
``(dx, dweight, dbias)``, None where it is not needed. All of it is in fp32 and rounded once.

Each program has one group of one sample, in tiles of ``block_rows`` channels by ``block`` positions. x and dy are read
through their strides; only where more than two spatial dimensions do not coalesce over all tensors of a launch are
contiguous copies made.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._rows import allocate_like, dense_vector, sum_partials
from liger_registry.kernels._spatial import unit_of, walk
from liger_registry.kernels.group_norm_device import differentiate, moments, normalise, rooted, row_sums, tile_of
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

# Partial sums of a channel that are added at a time; batches are rarely larger.
_PARTS = 64


@triton.jit(do_not_specialize=["spatial", "inner"])
def _forward_group(
    X,
    W,
    B,
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
    STAGES: tl.constexpr,
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
    n, first = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * SIZE
    count, mean, spread = moments(
        X, n, first, 0, 1, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, STAGES, DIMS, inner, xn, xc, x0, x1
    )
    rstd = rooted(spread, count, eps)
    tl.store(MEAN + tl.program_id(0), mean)
    tl.store(RSTD + tl.program_id(0), rstd)
    across = tl.cdiv(spatial, BLOCK)
    tiles = tl.cdiv(SIZE, BLOCK_CHANNELS) * across
    # Backwards: the end of a large group is what the cache still holds.
    for step in tl.range(0, tiles, num_stages=STAGES):
        down, right = (tiles - 1 - step) // across, (tiles - 1 - step) % across
        x_at, y_at, channel, mask = tile_of(
            n, first, down, right, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1, yn, yc,
            y0, y1,
        )  # fmt: skip
        x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
        y = normalise(x - mean, rstd, W, B, channel, channel < first + SIZE)
        tl.store(Y + y_at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["spatial", "inner"])
def _backward_group(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    DW,
    DB,
    spatial,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
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
    n, first = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * SIZE
    mean, rstd = tl.load(MEAN + tl.program_id(0)), tl.load(RSTD + tl.program_id(0))
    across = tl.cdiv(spatial, BLOCK)
    slope = tl.cast(0.0, tl.float32)
    shift = tl.cast(0.0, tl.float32)
    for down in range(0, tl.cdiv(SIZE, BLOCK_CHANNELS)):
        channel = first + down * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        inside = channel < first + SIZE
        dots, sums = row_sums(
            DY, X, n, first, down, 0, 1, mean, rstd, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, STAGES, DIMS,
            inner, dyn, dyc, dy0, dy1, xn, xc, x0, x1,
        )  # fmt: skip
        at = tl.cast(n, tl.int64) * CHANNELS + channel
        if DW is not None:
            tl.store(DW + at, dots, mask=inside)
        if DB is not None:
            tl.store(DB + at, sums, mask=inside)
        if DX is not None:
            if W is not None:
                w = tl.load(W + channel, mask=inside, other=0.0).to(tl.float32)
                dots, sums = dots * w, sums * w
            slope += tl.sum(dots, 0)
            shift += tl.sum(sums, 0)
    if DX is not None:
        count = tl.cast(spatial * SIZE, tl.float32)
        slope, shift = slope / count, shift / count
        tiles = tl.cdiv(SIZE, BLOCK_CHANNELS) * across
        for step in tl.range(0, tiles, num_stages=STAGES):
            down, right = (tiles - 1 - step) // across, (tiles - 1 - step) % across
            x_at, dy_at, channel, mask = tile_of(
                n, first, down, right, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1,
                dyn, dyc, dy0, dy1,
            )  # fmt: skip
            x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
            if W is not None:
                dy *= tl.load(W + channel, mask=channel < first + SIZE, other=0.0).to(tl.float32)[:, None]
            dx = differentiate(dy, (x - mean) * rstd, rstd, shift, slope)
            _, dx_at, _, _ = tile_of(
                n, first, down, right, spatial, CHANNELS, SIZE, BLOCK_CHANNELS, BLOCK, DIMS, inner, xn, xc, x0, x1,
                dxn, dxc, dx0, dx1,
            )  # fmt: skip
            tl.store(DX + dx_at, dx.to(DX.dtype.element_ty), mask=mask)


def options_for(num_warps: int, waves_per_eu: int | None) -> dict[str, Any]:
    """Launch options; ``waves_per_eu`` is None where the compiler does not know it."""
    return {"num_warps": num_warps} if waves_per_eu is None else {"num_warps": num_warps, "waves_per_eu": waves_per_eu}


def sizes_of(x: Tensor, groups: int) -> tuple[int, dict[str, int]]:
    """The positions of a channel in units, and the sizes that are in the code."""
    unit = unit_of(x)
    return math.prod(x.shape[2:]) // unit, {"CHANNELS": x.shape[1], "GROUPS": groups, "UNIT": unit}


def allocate(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty ``(y, mean, rstd)``, as the contract's ``allocate`` gives them."""
    mean, rstd = (x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2))
    return allocate_like(x), mean, rstd


def partials(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, needs: tuple[bool, ...], parts: int
) -> tuple[Tensor | None, Tensor | None]:
    """Memory for ``parts`` partial sums of the gradients of weight and bias, where they are needed."""
    shape = (parts, x.shape[1])
    return (
        x.new_empty(shape, dtype=torch.float32) if needs[1] and weight is not None else None,
        x.new_empty(shape, dtype=torch.float32) if needs[2] and bias is not None else None,
    )


def summed(partial: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A vector's gradient from its partial sums."""
    return None if partial is None or like is None else sum_partials(partial, like, _PARTS)


def forward_group(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, device: Device, groups: int, eps: float, block: int,
    block_rows: int, num_warps: int, num_stages: int = 1, waves_per_eu: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A group in tiles of ``block_rows`` channels by ``block`` positions, read twice."""
    config = {"BLOCK_CHANNELS": block_rows, "BLOCK": block, "STAGES": num_stages}
    return run_forward(_forward_group, x, weight, bias, groups, eps, config, options_for(num_warps, waves_per_eu))


def backward_group(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, device: Device,
    needs: tuple[bool, bool, bool], groups: int, eps: float, block: int, block_rows: int, num_warps: int,
    num_stages: int = 1, waves_per_eu: int | None = None,
) -> Gradients:  # fmt: skip
    """A group in tiles of ``block_rows`` channels by ``block`` positions, read twice."""
    config = {"BLOCK_CHANNELS": block_rows, "BLOCK": block, "STAGES": num_stages}
    options = options_for(num_warps, waves_per_eu)
    return run_backward(_backward_group, dy, x, weight, bias, mean, rstd, needs, groups, config, options)


def run_forward(
    kernel: Any,  # noqa: ANN401
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    config: dict[str, int],
    options: dict[str, Any],
    at_a_time: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A forward kernel for each group of each sample, or for so many of them at a time, which it then has to count."""
    y, mean, rstd = allocate(x, groups)
    (source,), target, dims, strides = walk((x,), y)
    spatial, sizes = sizes_of(x, groups)
    weight, bias = dense_vector(weight), dense_vector(bias)
    total = mean.numel()
    counted = (total, spatial) if at_a_time else (spatial,)
    arguments = source, weight, bias, target, mean, rstd, *counted, eps, *strides
    launch(kernel, (-(-total // max(at_a_time, 1)),), *arguments, **sizes, **config, DIMS=dims, **options)
    return y if target is y or target is None else y.copy_(target), mean, rstd


def run_backward(
    kernel: Any,  # noqa: ANN401
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs: tuple[bool, ...],
    groups: int,
    config: dict[str, int],
    options: dict[str, Any],
    at_a_time: int = 0,
) -> Gradients:
    """A backward kernel, likewise, and the sums of what it left of the vectors' gradients."""
    dx = allocate_like(x) if needs[0] else None
    dw, db = partials(x, weight, bias, needs, x.shape[0])
    if dx is None and dw is None and db is None:
        return None, None, None
    sources, target, dims, strides = walk((dy, x), dx)
    spatial, sizes = sizes_of(x, groups)
    statistics = (t if t.is_contiguous() else t.contiguous() for t in (mean, rstd))
    total = mean.numel()
    counted = (total, spatial) if at_a_time else (spatial,)
    arguments = *sources, dense_vector(weight), *statistics, target, dw, db, *counted, *strides
    launch(kernel, (-(-total // max(at_a_time, 1)),), *arguments, **sizes, **config, DIMS=dims, **options)
    dx = dx if dx is None or target is dx or target is None else dx.copy_(target)
    return dx, summed(dw, weight), summed(db, bias)
