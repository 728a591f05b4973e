"""Kernels that take the statistics of rows of logits, for ``logit_statistics`` and the losses over logits.

One kernel serves all implementations: rows in registers, blocks of columns in a loop, or parts of rows that several
programs share, which a second launch puts together: no atomics and no counters, so results have the same bits every
time, on any stream and in graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._logit_grid import block_for, grid_of, options_for, walk
from liger_registry.kernels._logits import log_of, mean_with, merge, own_columns, scan, tanh_and_slope
from liger_registry.kernels._rows import column_offsets, row_ids, row_offsets
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit
def _store_row(
    row,
    active,
    there,
    target_logit,
    top,
    total,
    moment,
    weighted,
    best,
    position,
    softcap,
    LOG_REST,
    TARGET_LOGIT,
    WEIGHTED_SUM,
    MEAN,
    BEST,
    PREDICTION,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    read,
):
    """Store the statistics of rows; those of rows that were not read are 0, and their prediction -1, if SKIP."""
    log_rest = log_of(top, total)
    if SKIP:
        log_rest = tl.where(read, log_rest, 0.0)
        position = tl.where(read, position, -1)
    tl.store(LOG_REST + row, log_rest, mask=active)
    tl.store(TARGET_LOGIT + row, target_logit, mask=active)
    if WEIGHTED_SUM is not None:
        tl.store(WEIGHTED_SUM + row, weighted, mask=active)
    if MEAN is not None:
        tl.store(MEAN + row, mean_with(target_logit, there, top, total, moment), mask=active)
    if BEST is not None:
        if CAPPED:
            value, _ = tanh_and_slope(best / softcap)
            best = softcap * value
        tl.store(BEST + row, best, mask=active)
    if PREDICTION is not None:
        tl.store(PREDICTION + row, position.to(tl.int64), mask=active)


@triton.jit(do_not_specialize=["rows", "ignored", "n1", "n2", "n3"])
def statistics(
    X,
    TARGET,
    W,
    LOG_REST,
    TARGET_LOGIT,
    WEIGHTED_SUM,
    MEAN,
    BEST,
    PREDICTION,
    PARTS,
    POSITIONS,
    rows,
    ignored,
    softcap,
    scale,
    VOCAB: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
):
    """Statistics of rows, or with SPLITS > 1 of parts of them into (rows, 4, SPLITS) ``PARTS`` and ``POSITIONS``.

    With SKIP, rows whose target is ``ignored`` or no class are not read.
    """
    WEIGHTED: tl.constexpr = WEIGHTED_SUM is not None
    ENTROPY: tl.constexpr = MEAN is not None
    PREDICT: tl.constexpr = PREDICTION is not None
    if CAPPED:
        softcap = tl.cast(softcap, tl.float32)
    if scale is not None:
        scale = tl.cast(scale, tl.float32)
    part = tl.program_id(0) % SPLITS
    for tile in tl.range(
        tl.program_id(0) // SPLITS, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0) // SPLITS, num_stages=1
    ):
        row = row_ids(tile, rows, BLOCK_ROWS)
        active = row < tl.cast(rows, row.dtype)
        index = row.to(tl.int64)
        target = tl.load(TARGET + index, mask=active, other=-1)
        own = own_columns(target, VOCAB)
        there = own >= 0
        read = active
        if SKIP:
            there = there & (target != ignored)
            read = active & there
        x_rows = X + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)[:, None]
        lanes = scan(
            x_rows,
            x_column,
            W,
            read[:, None],
            own,
            part * BLOCK,
            SPLITS * BLOCK,
            softcap,
            scale,
            VOCAB,
            BLOCK_ROWS,
            BLOCK,
            STAGES,
            CAPPED,
            WEIGHTED,
            ENTROPY,
            PREDICT,
            SPLITS == 1 and BLOCK >= VOCAB,
        )
        top, total, moment, weighted, best, position = merge(
            lanes[0], lanes[1], lanes[2], lanes[3], lanes[4], lanes[5], WEIGHTED, ENTROPY, PREDICT
        )
        if SPLITS > 1:
            into = PARTS + index * (5 * SPLITS) + part
            tl.store(into, top, mask=active)
            tl.store(into + SPLITS, total, mask=active)
            if ENTROPY:
                tl.store(into + 2 * SPLITS, moment, mask=active)
            if WEIGHTED:
                tl.store(into + 3 * SPLITS, weighted, mask=active)
            if PREDICT:
                tl.store(into + 4 * SPLITS, best, mask=active)
                tl.store(POSITIONS + index * SPLITS + part, position, mask=active)
        else:
            target_logit = _target_logit(x_rows, x_column, own, there, softcap, scale, CAPPED)
            _store_row(
                index,
                active,
                there,
                target_logit,
                top,
                total,
                moment,
                weighted,
                best,
                position,
                softcap,
                LOG_REST,
                TARGET_LOGIT,
                WEIGHTED_SUM,
                MEAN,
                BEST,
                PREDICTION,
                CAPPED,
                SKIP,
                read,
            )


@triton.jit
def _target_logit(x_rows, x_column, own, there, softcap, scale, CAPPED: tl.constexpr):
    """z of the targets, 0 where there is none."""
    x = tl.load(x_rows + column_offsets(own, x_column)[:, None], mask=there[:, None], other=0.0).to(tl.float32)
    z = tl.sum(x, 1)  # of one column: another shape
    if scale is not None:
        z *= scale
    if CAPPED:
        value, _ = tanh_and_slope(z / softcap)
        z = softcap * value
    return tl.where(there, z, 0.0)


@triton.jit(do_not_specialize=["rows", "ignored", "n1", "n2", "n3"])
def join(
    X,
    TARGET,
    PARTS,
    POSITIONS,
    LOG_REST,
    TARGET_LOGIT,
    WEIGHTED_SUM,
    MEAN,
    BEST,
    PREDICTION,
    rows,
    ignored,
    softcap,
    scale,
    VOCAB: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
):
    """The statistics of rows from those of their parts."""
    if CAPPED:
        softcap = tl.cast(softcap, tl.float32)
    if scale is not None:
        scale = tl.cast(scale, tl.float32)
    row = row_ids(tl.program_id(0), rows, BLOCK_ROWS)
    active = row < tl.cast(rows, row.dtype)
    index = row.to(tl.int64)
    target = tl.load(TARGET + index, mask=active, other=-1)
    own = own_columns(target, VOCAB)
    there = own >= 0
    read = active
    if SKIP:
        there = there & (target != ignored)
        read = active & there
    part = tl.arange(0, SPLITS)[None, :]
    parts = PARTS + index[:, None] * (5 * SPLITS) + part
    mask = active[:, None]
    largest = tl.load(parts, mask=mask, other=0.0)
    total = tl.load(parts + SPLITS, mask=mask, other=0.0)
    moment = total
    weighted = total
    best = total
    position = tl.zeros_like(total).to(tl.int32)
    if MEAN is not None:
        moment = tl.load(parts + 2 * SPLITS, mask=mask, other=0.0)
    if WEIGHTED_SUM is not None:
        weighted = tl.load(parts + 3 * SPLITS, mask=mask, other=0.0)
    if PREDICTION is not None:
        best = tl.load(parts + 4 * SPLITS, mask=mask, other=0.0)
        position = tl.load(POSITIONS + index[:, None] * SPLITS + part, mask=mask, other=0)
    top, total, moment, weighted, best, position = merge(
        largest,
        total,
        moment,
        weighted,
        best,
        position,
        WEIGHTED_SUM is not None,
        MEAN is not None,
        PREDICTION is not None,
    )
    x_rows = X + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)[:, None]
    target_logit = _target_logit(x_rows, x_column, own, there, softcap, scale, CAPPED)
    _store_row(
        index,
        active,
        there,
        target_logit,
        top,
        total,
        moment,
        weighted,
        best,
        position,
        softcap,
        LOG_REST,
        TARGET_LOGIT,
        WEIGHTED_SUM,
        MEAN,
        BEST,
        PREDICTION,
        CAPPED,
        SKIP,
        read,
    )


def take_statistics(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    outputs: tuple[Tensor | None, ...],
    *,
    device: Device,
    softcap: float,
    scale: float | None,
    ignored: int | None,
    num_warps: int,
    block_rows: int,
    block: int,
    splits: int,
    programs_per_unit: int,
    num_stages: int,
    waves_per_eu: int | None,
) -> None:
    """Fill the outputs of ``logit_statistics``, each (rows,) and contiguous or None.

    Args:
        logits: (..., vocab), read through its strides.
        target: (rows,), contiguous.
        class_weight: (vocab,), contiguous, or None.
        outputs: log_rest, target_logit, weighted_sum, mean_logit, best, prediction.
        device: the device.
        softcap: 0 for none.
        scale: None for 1.
        ignored: rows of this target, and of those that are no class, are not read: their log_rest and target_logit are
            0, their prediction -1. None reads all.
        num_warps: of a program.
        block_rows: rows of a tile.
        block: columns of a tile, 0 for the whole row.
        splits: programs that share a row.
        programs_per_unit: how many walk over the rows, 0 for one each tile.
        num_stages: of the loop over blocks.
        waves_per_eu: for AMD.
    """
    vocab = logits.shape[-1]
    rows = target.numel()
    source, _, row_dims, strides = walk(logits)
    parts = positions = None
    if splits > 1:
        parts = logits.new_empty((rows, 5, splits), dtype=torch.float32)
        positions = logits.new_empty((rows, splits), dtype=torch.int32) if outputs[5] is not None else None
    same = {
        "VOCAB": vocab,
        "SPLITS": splits,
        "ROW_DIMS": row_dims,
        "CAPPED": softcap != 0.0,
        "SKIP": ignored is not None,
    }
    numbers = (rows, ignored or 0, softcap, scale)
    launch(
        statistics,
        grid_of(rows, block_rows, splits, programs_per_unit, device),
        source,
        target,
        class_weight,
        *outputs,
        parts,
        positions,
        *numbers,
        *strides,
        BLOCK_ROWS=block_rows,
        BLOCK=block_for(vocab, block),
        STAGES=num_stages,
        **same,
        **options_for(num_warps, waves_per_eu),
    )
    if splits > 1:
        # One row a program: a second launch is all latency, and rows are few where they are split.
        launch(
            join,
            (rows,),
            source,
            target,
            parts,
            positions,
            *outputs,
            *numbers,
            *strides,
            BLOCK_ROWS=1,
            num_warps=1,
            **same,
        )
