"""How kernels over logits are launched: what they read and write, how many programs there are, how wide a block is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.kernels._rows import MOST_ROW_DIMS, Strides, strided

if TYPE_CHECKING:
    from liger_registry.device import Device


def walk(logits: Tensor, gradient: Tensor | None = None) -> tuple[Tensor, Tensor | None, int, Strides]:
    """What a kernel reads and writes, its ``ROW_DIMS`` and strides.

    Where no kernel can walk over the rows these are contiguous copies, and what it writes is to be copied back.
    """
    if logits.is_contiguous() and (gradient is None or gradient.is_contiguous()):
        return logits, gradient, 0, ()
    row_dims, strides = strided((logits,), () if gradient is None else (gradient,))
    if row_dims <= MOST_ROW_DIMS:
        return logits, gradient, row_dims, strides
    dense = None if gradient is None else torch.empty_like(gradient, memory_format=torch.contiguous_format)
    return logits.contiguous(), dense, 0, ()


def gradient_like(logits: Tensor, in_place: bool) -> Tensor:
    """Where a gradient of logits goes: into their own memory if that is allowed and can be, else an empty tensor.

    It cannot where elements share memory, as those of an expanded tensor do, or where columns are not contiguous.
    """
    if logits.stride(-1) != 1:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.detach() if in_place and _apart(logits) else torch.empty_like(logits)


def _apart(tensor: Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += stride * (size - 1)
    return True


def grid_of(rows: int, block_rows: int, splits: int, programs_per_unit: int, device: Device) -> tuple[int]:
    """Programs: one for each tile, or so many for each unit that walk over the tiles; times the parts of a row."""
    tiles = -(-rows // block_rows)
    return ((min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles) * splits,)


def options_for(num_warps: int, waves_per_eu: int | None) -> dict[str, Any]:
    """Launch options; ``waves_per_eu`` is None where the compiler does not know it."""
    return {"num_warps": num_warps} if waves_per_eu is None else {"num_warps": num_warps, "waves_per_eu": waves_per_eu}


def block_for(vocab: int, block: int) -> int:
    """The block: as given, but no wider than one that holds the row; 0 stands for just that."""
    whole = 1 << (vocab - 1).bit_length()
    return min(block, whole) if block else whole
