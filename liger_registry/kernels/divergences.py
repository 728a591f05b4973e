"""``jsd``, ``kl_div`` and ``tvd`` in Triton; formulas and reductions are those of ``liger_registry.ops._divergences``.

Forward launch functions take ``(input, target, shift_labels)`` with input and target (..., vocab), labels (...) or
None, and return ``(loss, scale)``; backward ones take ``(grad_loss, input, target, shift_labels, scale)`` and return
``(grad_input,)``, or None in its place where it is not needed. Which operation it is shows in its options:
``beta`` has ``jsd`` alone, ``log_target`` and ``eps`` ``kl_div``.

Programs walk over rows in blocks of columns. A sum goes through one partial sum a program, which a second launch adds
up in an order that never changes, and counts the rows that count where the host does not know it. The gradient is
computed from the inputs with the upstream gradient and all factors in it: they are read once and it is written once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.kernels._rows import MOST_ROW_DIMS, Strides, allocate_like, strided
from liger_registry.kernels.divergences_device import add_up, backward_blocks, forward_blocks
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device

_COUNTED = ("mean", "batchmean")
_TOTAL_BLOCK = 4096


def kind_of(options: dict[str, Any]) -> tuple[str, float, float]:
    """``KIND`` and the two numbers of an operation's options."""
    if "beta" in options:
        beta = options["beta"]
        return {0.0: "forward", 1.0: "reverse"}.get(beta, "mixture"), beta, 1.0 - beta
    if "log_target" in options:
        return "forward" if options["log_target"] else "plain", options["eps"], 0.0
    return "distance", 0.0, 0.0


def factor_of(rows: int, vocab: int, reduction: str, counted: bool) -> float:
    """What the host knows of the factor on the sum; rows are counted on the device where they have labels."""
    factor = 1.0 / vocab if reduction == "mean" else 1.0
    return factor / max(rows, 1) if reduction in _COUNTED and not counted else factor


def _walk(reads: tuple[Tensor, ...], write: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None, int, Strides]:
    """What a kernel reads and writes, its ``ROW_DIMS`` and strides; copies only where it cannot walk over the rows."""
    if all(t.is_contiguous() for t in reads) and (write is None or write.is_contiguous()):
        return reads, write, 0, ()
    row_dims, strides = strided(reads, () if write is None else (write,))
    if row_dims <= MOST_ROW_DIMS:
        return reads, write, row_dims, strides
    dense = None if write is None else torch.empty_like(write, memory_format=torch.contiguous_format)
    return tuple(t.contiguous() for t in reads), dense, 0, ()


def _options(num_warps: int, waves_per_eu: int | None) -> dict[str, int]:
    return {"num_warps": num_warps} if waves_per_eu is None else {"num_warps": num_warps, "waves_per_eu": waves_per_eu}


def _launch_forward(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    programs: int,
    *,
    block: int,
    num_stages: int,
    num_warps: int,
    waves_per_eu: int | None,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    vocab, elementwise = x.shape[-1], reduction == "none"
    rows, blocks = math.prod(x.shape[:-1]), -(-vocab // block)
    sums_dtype = x.dtype if "beta" in options else torch.float32
    labels = None if labels is None else labels.contiguous().view(-1)
    kind, first, second = kind_of(options)
    grid = rows if programs == 0 else min(rows * blocks, programs)
    out = allocate_like(x, sums_dtype) if elementwise else x.new_empty(grid, dtype=torch.float32)
    (x_read, y_read), written, row_dims, strides = _walk((x, target), out if elementwise else None)
    launch(
        forward_blocks,
        (grid,),
        x_read,
        y_read,
        labels,
        written if elementwise else out,
        rows * blocks,
        1 if programs == 0 else max(grid, 1),
        ignore_index,
        first,
        second,
        *strides,
        VOCAB=vocab,
        BLOCK=block,
        STAGES=num_stages,
        KIND=kind,
        ELEMENTWISE=elementwise,
        WALK=programs != 0,
        ROW_DIMS=row_dims,
        **_options(num_warps, waves_per_eu),
    )
    if elementwise:
        return out if written is out or written is None else out.copy_(written), None
    counted = labels is not None and reduction in _COUNTED
    loss = x.new_empty((), dtype=sums_dtype)
    scale = x.new_empty((), dtype=torch.float32) if counted else None
    launch(
        add_up,
        (1,),
        out,
        labels if counted else None,
        loss,
        scale,
        grid,
        rows,
        ignore_index,
        factor_of(rows, vocab, reduction, counted),
        BLOCK=_TOTAL_BLOCK,
        num_warps=8,
    )
    return loss, scale


def _sizes(block: int, num_stages: int, num_warps: int, waves_per_eu: int | None) -> dict[str, Any]:
    return {"block": block, "num_stages": num_stages, "num_warps": num_warps, "waves_per_eu": waves_per_eu}


def forward_row(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    *,
    device: Device,
    block: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A program a row, its blocks of columns one after the other."""
    sizes: dict[str, Any] = {
        "block": block,
        "num_stages": num_stages,
        "num_warps": num_warps,
        "waves_per_eu": waves_per_eu,
    }
    return _launch_forward(x, target, labels, 0, **sizes, **options)


def forward_tiles(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    *,
    device: Device,
    block: int,
    num_warps: int,
    programs_per_unit: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Blocks of all rows, dealt out to ``programs_per_unit`` programs a unit: as many for few rows as for many."""
    sizes: dict[str, Any] = {
        "block": block,
        "num_stages": num_stages,
        "num_warps": num_warps,
        "waves_per_eu": waves_per_eu,
    }
    return _launch_forward(x, target, labels, programs_per_unit * device.units, **sizes, **options)


def _launch_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    programs: int,
    *,
    block: int,
    num_stages: int,
    num_warps: int,
    waves_per_eu: int | None,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> tuple[Tensor]:
    vocab, elementwise, dx = x.shape[-1], reduction == "none", allocate_like(x)
    rows, blocks = math.prod(x.shape[:-1]), -(-vocab // block)
    labels = None if labels is None else labels.contiguous().view(-1)
    kind, first, second = kind_of(options)
    reads, written, row_dims, strides = _walk((x, target, grad) if elementwise else (x, target), dx)
    if row_dims and not elementwise:  # the gradient of a scalar has no strides
        strides = (*strides[:13], *[None] * 5, *strides[13:])
    grid = rows if programs == 0 else min(rows * blocks, programs)
    launch(
        backward_blocks,
        (grid,),
        reads[2] if elementwise else grad,
        *reads[:2],
        labels,
        scale,
        written,
        rows * blocks,
        1 if programs == 0 else max(grid, 1),
        ignore_index,
        1.0 if scale is not None else factor_of(rows, vocab, reduction, False),
        first,
        second,
        *strides,
        VOCAB=vocab,
        BLOCK=block,
        STAGES=num_stages,
        KIND=kind,
        ELEMENTWISE=elementwise,
        WALK=programs != 0,
        ROW_DIMS=row_dims,
        **_options(num_warps, waves_per_eu),
    )
    return (dx if written is dx or written is None else dx.copy_(written),)


def backward_row(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    block: int,
    num_warps: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
    **options: Any,
) -> tuple[Tensor | None]:
    """A program a row, its blocks of columns one after the other."""
    if not needs[0]:
        return (None,)
    sizes: dict[str, Any] = {
        "block": block,
        "num_stages": num_stages,
        "num_warps": num_warps,
        "waves_per_eu": waves_per_eu,
    }
    return _launch_backward(grad, x, target, labels, scale, 0, **sizes, **options)


def backward_tiles(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    scale: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    block: int,
    num_warps: int,
    programs_per_unit: int,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
    **options: Any,
) -> tuple[Tensor | None]:
    """Blocks of all rows, dealt out as in ``forward_tiles``; with ``programs_per_unit=0`` each has its own program."""
    if not needs[0]:
        return (None,)
    blocks = -(-x.shape[-1] // block) * math.prod(x.shape[:-1])
    programs = programs_per_unit * device.units if programs_per_unit else max(blocks, 1)
    sizes: dict[str, Any] = {
        "block": block,
        "num_stages": num_stages,
        "num_warps": num_warps,
        "waves_per_eu": waves_per_eu,
    }
    return _launch_backward(grad, x, target, labels, scale, programs, **sizes, **options)
