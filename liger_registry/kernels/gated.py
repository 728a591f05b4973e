"""Gated activations, ``act(gate) * up``, and activations alone, in Triton: what the launch functions of ``swiglu``,
``geglu`` and ``relu_squared`` have in common.

``kind`` is ``silu``, ``gelu`` or ``relu_squared``, ``options`` are those of the operation. Tensors are (..., width);
without ``up``, ``gate`` is one packed tensor (..., 2 * width) of gates and ups, but for ``relu_squared``, which has no
second factor. Forward rounds where the models' formula does: the scaled gate and the activation to the gate's dtype,
the product to the result's, and that once more where it is scaled. Backward computes the activation anew, in fp32, and
rounds each gradient once.

Tensors are read through their strides. Only with more than four leading dimensions that do not coalesce over all
tensors of a launch is a contiguous copy made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.kernels import gated_device as kernels
from liger_registry.kernels._rows import MOST_ROW_DIMS, Strides, allocate_like, strided
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

    Gradients = tuple[Tensor | None, ...]

# A tensor's strides among the arguments of the kernels on rows: of its rows, and of its columns if it is read.
_WRITTEN = MOST_ROW_DIMS
_READ = MOST_ROW_DIMS + 1


def is_packed(kind: str, up: Tensor | None) -> bool:
    """Whether the gate's tensor holds the ups too."""
    return up is None and kind != "relu_squared"


def allocate(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """An empty result, as the contracts' ``allocate`` gives it."""
    if is_packed(kind, up):
        return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2)
    if up is None or up.dtype == gate.dtype:
        return allocate_like(gate)
    return allocate_like(gate, torch.promote_types(gate.dtype, up.dtype))


def forward_flat(
    kind: str,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    block: int,
    num_warps: int,
    waves_per_eu: int | None = None,
    **options: Any,
) -> tuple[Tensor]:
    """Contiguous tensors as they lie in memory, ``block`` elements a program; others by rows, in tiles of that size."""
    if is_packed(kind, up) or not _dense(gate, up):
        width = gate.shape[-1] // 2 if is_packed(kind, up) else gate.shape[-1]
        compiler: dict[str, Any] = {"num_warps": num_warps, "waves_per_eu": waves_per_eu}
        return forward_rows(kind, gate, up, device=device, **_tile(width, block), **compiler, **options)
    activation, multipliers = _formula(kind, **options)
    y, count, width = allocate(kind, gate, up), gate.numel(), gate.shape[-1]
    launch(
        kernels.forward_flat,
        (-(-count // block),),
        gate,
        up,
        y,
        count // width,
        *multipliers,
        WIDTH=width,
        BLOCK=block,
        ACT=activation,
        **_compiler(num_warps, waves_per_eu),
    )
    return (y,)


def forward_rows(
    kind: str,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    block: int,
    block_rows: int,
    num_warps: int,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
    **options: Any,
) -> tuple[Tensor]:
    """Tiles of ``block_rows`` rows by ``block`` columns, a program each, or as many a unit that walk over them."""
    y = allocate(kind, gate, up)
    row_dims, strides = _strides((gate, up), (y,))
    if row_dims > MOST_ROW_DIMS:
        same: dict[str, Any] = {
            "block": block,
            "block_rows": block_rows,
            "num_warps": num_warps,
            "waves_per_eu": waves_per_eu,
        }
        same |= {"programs_per_unit": programs_per_unit, "num_stages": num_stages}
        (dense,) = forward_rows(kind, gate.contiguous(), _contiguous(up), device=device, **same, **options)
        return (y.copy_(dense),)
    activation, multipliers = _formula(kind, **options)
    width = y.shape[-1]
    rows = y.numel() // width
    launch(
        kernels.forward_rows,
        _grid(rows, width, block, block_rows, programs_per_unit, device),
        gate,
        up,
        y,
        rows,
        *multipliers,
        *strides,
        WIDTH=width,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        ACT=activation,
        PACKED=is_packed(kind, up),
        ROW_DIMS=row_dims,
        **_compiler(num_warps, waves_per_eu),
    )
    return (y,)


def backward_flat(
    kind: str,
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    needs: tuple[bool, ...],
    block: int,
    num_warps: int,
    waves_per_eu: int | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of contiguous tensors as they lie in memory; of others by rows, in tiles of ``block`` elements."""
    count, width = dy.numel(), dy.shape[-1]
    if is_packed(kind, up) or not _dense(dy, gate, up):
        compiler: dict[str, Any] = {"num_warps": num_warps, "waves_per_eu": waves_per_eu}
        return backward_rows(
            kind, dy, gate, up, device=device, needs=needs, **_tile(width, block), **compiler, **options
        )
    dgate, dup = _allocate_gradients(gate, up, needs)
    if dgate is not None or dup is not None:
        activation, multipliers = _formula(kind, **options)
        launch(
            kernels.backward_flat,
            (-(-count // block),),
            dy,
            gate,
            up,
            dgate,
            dup,
            count // width,
            *multipliers,
            WIDTH=width,
            BLOCK=block,
            ACT=activation,
            **_compiler(num_warps, waves_per_eu),
        )
    return (dgate, dup)[: len(needs)]


def backward_rows(
    kind: str,
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    needs: tuple[bool, ...],
    block: int,
    block_rows: int,
    num_warps: int,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
    **options: Any,
) -> Gradients:
    """Gradients in tiles of ``block_rows`` rows by ``block`` columns; ``programs_per_unit`` as in ``forward_rows``."""
    dgate, dup = _allocate_gradients(gate, up, needs)
    if dgate is None and dup is None:
        return (None, None)[: len(needs)]
    row_dims, strides = _strides((dy, gate, up), (dgate, dup))
    if row_dims > MOST_ROW_DIMS:
        same: dict[str, Any] = {
            "block": block,
            "block_rows": block_rows,
            "num_warps": num_warps,
            "waves_per_eu": waves_per_eu,
        }
        same |= {"programs_per_unit": programs_per_unit, "num_stages": num_stages}
        dense, dy = _contiguous(up), dy.contiguous()
        return backward_rows(kind, dy, gate.contiguous(), dense, device=device, needs=needs, **same, **options)
    activation, multipliers = _formula(kind, **options)
    width = dy.shape[-1]
    rows = dy.numel() // width
    launch(
        kernels.backward_rows,
        _grid(rows, width, block, block_rows, programs_per_unit, device),
        dy,
        gate,
        up,
        dgate,
        dup,
        rows,
        *multipliers,
        *strides,
        WIDTH=width,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        STAGES=num_stages,
        ACT=activation,
        PACKED=is_packed(kind, up),
        ROW_DIMS=row_dims,
        **_compiler(num_warps, waves_per_eu),
    )
    return (dgate, dup)[: len(needs)]


def _formula(
    kind: str, approximate: str = "", gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> tuple[str, tuple[float | None, float | None]]:
    """The kernels' name of an activation, and the multipliers: both or, where neither changes anything, none."""
    scaled = gate_multiplier != 1.0 or down_multiplier != 1.0
    activation = f"{kind}_{approximate}" if approximate else kind
    return activation, (gate_multiplier, down_multiplier) if scaled else (None, None)


def _compiler(num_warps: int, waves_per_eu: int | None) -> dict[str, int]:
    """Launch options; ``waves_per_eu`` is None where the compiler does not know it."""
    return {"num_warps": num_warps} | ({} if waves_per_eu is None else {"waves_per_eu": waves_per_eu})


def _tile(width: int, block: int) -> dict[str, int]:
    """The tile of rows with as many elements as a flat block."""
    columns = min(block, 1 << (width - 1).bit_length())
    return {"block": columns, "block_rows": block // columns}


def _grid(
    rows: int, width: int, block: int, block_rows: int, programs_per_unit: int, device: Device
) -> tuple[int, ...]:
    tiles = -(-rows // block_rows) * -(-width // block)
    return (min(tiles, programs_per_unit * device.units) if programs_per_unit else tiles,)


def _allocate_gradients(
    gate: Tensor, up: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    dgate = allocate_like(gate) if needs[0] else None
    return dgate, allocate_like(up) if up is not None and needs[1] else None


def _dense(*tensors: Tensor | None) -> bool:
    return all(t is None or t.is_contiguous() for t in tensors)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(reads: tuple[Tensor | None, ...], writes: tuple[Tensor | None, ...]) -> tuple[int, Strides]:
    """``ROW_DIMS`` and the strides of ``strided``, where an absent ``up``, the last that is read, has none."""
    if _dense(*reads, *writes):
        return 0, ()
    there = tuple(t for t in reads if t is not None)
    row_dims, strides = strided(there, writes)
    if len(there) < len(reads) and strides:
        before = len(strides) - _WRITTEN * len(writes)
        strides = (*strides[:before], *[None] * _READ, *strides[before:])
    return row_dims, strides
