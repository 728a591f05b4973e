"""Tensors of (batch, channels, *spatial) whose dimensions have strides of their own, on the host and in kernels.

A kernel walks over the positions of channels. Contiguous tensors need no strides: ``DIMS`` is 0. Others pass strides of
batch, channels and up to two spatial dimensions, coalesced over all tensors of the launch: one for channels-last
images, two for images cut out of larger ones.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_DIMS = 2

Strides = tuple[int | None, ...]


def walk(reads: tuple[Tensor, ...], write: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None, int, Strides]:
    """How a kernel finds the elements of tensors of one shape, not all of them contiguous.

    Args:
        reads: tensors the kernel reads.
        write: a tensor it writes, None for an absent one.

    Returns:
        What the kernel reads and writes, ``DIMS``, and the arguments at the end of kernels' signatures: the inner size
        and four strides of each tensor (batch, channel, inner and outer position). Where no kernel can walk over the
        tensors, what it reads are copies, and what it writes is to be copied to ``write``.
    """
    there = reads if write is None else (*reads, write)
    if all(t.is_contiguous() for t in there):
        return reads, write, 0, ()
    sizes: list[int] = []
    strides: list[list[int]] = []  # of each dim, one a tensor
    for dim, size in enumerate(reads[0].shape[2:], 2):
        if size == 1:
            continue
        steps = [t.stride(dim) for t in there]
        if sizes and strides[-1] == [step * size for step in steps]:
            sizes[-1] *= size
            strides[-1] = steps
        else:
            sizes.append(size)
            strides.append(steps)
    if len(sizes) > MOST_DIMS:
        dense = None if write is None else torch.empty_like(write, memory_format=torch.contiguous_format)
        return tuple(t.contiguous() for t in reads), dense, 0, ()
    none = [1] * len(there)
    outer, inner = ([none, none, *strides])[-2:] if len(sizes) > 1 else (none, (strides or [none])[-1])
    arguments: list[int | None] = [sizes[-1] if sizes else 1]
    for number, tensor in enumerate(there):
        arguments += [tensor.stride(0), tensor.stride(1), inner[number], outer[number]]
    if write is None:
        arguments += [None] * 4
    return reads, write, max(len(sizes), 1), tuple(arguments)


def unit_of(x: Tensor) -> int:
    """The largest number, 16 or 1, that divides the positions of a channel.

    Kernels get the positions in these units, so that the compiler knows what divides them and a new size compiles
    nothing: two kernels serve all sizes.
    """
    return 16 if math.prod(x.shape[2:]) % 16 == 0 else 1


@triton.jit
def channel_offsets(n, channel, spatial, CHANNELS: tl.constexpr, DIMS: tl.constexpr, n_stride, c_stride):
    """Where channels of a sample start, in elements, int64: more than 2^31 elements are no exception."""
    if DIMS == 0:
        offset = (tl.cast(n, tl.int64) * CHANNELS + channel) * spatial
    else:
        offset = tl.cast(n, tl.int64) * n_stride + channel.to(tl.int64) * c_stride
    return offset


@triton.jit
def position_offsets(position, DIMS: tl.constexpr, inner, s0, s1):
    """Where positions lie in a channel."""
    if DIMS == 0:
        offset = position
    elif DIMS == 1:
        offset = position.to(tl.int64) * s0
    else:
        offset = (position % inner).to(tl.int64) * s0 + (position // inner).to(tl.int64) * s1
    return offset
