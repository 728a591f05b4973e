"""``logit_statistics`` in Triton; the formula is that of ``liger_registry.ops.logit_statistics``.

Forward takes ``(logits, target, class_weight)`` and returns ``(log_rest, target_logit, weighted_sum, mean_logit, best,
prediction)``, each (rows,) or None; backward takes their gradients, the inputs and ``(log_rest, target_logit,
mean_logit)`` and returns ``(grad_logits,)``, which is the logits' own memory with ``in_place``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._logit_grid import block_for, gradient_like, grid_of, options_for, walk
from liger_registry.kernels._logit_rows import take_statistics
from liger_registry.kernels._logits import gradient_tile, is_own, own_columns
from liger_registry.kernels._rows import column_offsets, dense_vector, row_ids, row_offsets
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit(do_not_specialize=["rows", "n1", "n2", "n3"])
def _gradient(
    G_REST,
    G_TARGET,
    G_WEIGHTED,
    G_MEAN,
    X,
    TARGET,
    W,
    LOG_REST,
    TARGET_LOGIT,
    MEAN,
    DX,
    rows,
    softcap,
    scale,
    VOCAB: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    CAPPED: tl.constexpr,
    n1=None,
    n2=None,
    n3=None,
    x_column=None,
    x0=None,
    x1=None,
    x2=None,
    x3=None,
    y0=None,
    y1=None,
    y2=None,
    y3=None,
):
    if CAPPED:
        softcap = tl.cast(softcap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    part = tl.program_id(0) % SPLITS
    tiles = tl.cdiv(rows, BLOCK_ROWS)
    lane = tl.arange(0, BLOCK)
    for step in tl.range(tl.program_id(0) // SPLITS, tiles, tl.num_programs(0) // SPLITS, num_stages=1):
        # Backwards: the last rows are what the cache still holds of the forward.
        row = row_ids(tiles - 1 - step, rows, BLOCK_ROWS)
        active = row < tl.cast(rows, row.dtype)
        index = row.to(tl.int64)
        own = own_columns(tl.load(TARGET + index, mask=active, other=-1), VOCAB)
        log_rest = tl.load(LOG_REST + index, mask=active, other=0.0)
        nothing = tl.zeros_like(log_rest)
        rest_factor = nothing
        own_gradient = nothing
        weighted_factor = None
        mean_factor = None
        mean = None
        total_log = None
        if G_REST is not None:
            rest_factor = tl.load(G_REST + index, mask=active, other=0.0).to(tl.float32)
        if G_TARGET is not None:
            own_gradient = tl.load(G_TARGET + index, mask=active, other=0.0).to(tl.float32)
        if G_WEIGHTED is not None:
            weighted_factor = tl.load(G_WEIGHTED + index, mask=active, other=0.0).to(tl.float32)
        if G_MEAN is not None:
            mean_factor = tl.load(G_MEAN + index, mask=active, other=0.0).to(tl.float32)
            mean = tl.load(MEAN + index, mask=active, other=0.0)
            mine = tl.load(TARGET_LOGIT + index, mask=active, other=0.0)
            mine = tl.where(own >= 0, mine, -float("inf"))
            top = _finite(tl.maximum(log_rest, mine))
            # In the order in which NaN stays NaN: a maximum passes over it.
            total_log = top + tl.log(tl.exp(log_rest - top) + tl.exp(mine - top))
            total_log = _finite(total_log)
        log_rest = _finite(log_rest)
        x_rows = X + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)[:, None]
        y_rows = DX + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)[:, None]
        for first in tl.range(part * BLOCK, VOCAB, SPLITS * BLOCK, num_stages=STAGES):
            column = first + lane
            mask = active[:, None] & (column < VOCAB)[None, :]
            x = tl.load(
                x_rows + column_offsets(column, x_column)[None, :],
                mask=mask,
                other=-float("inf"),
                eviction_policy="evict_first",
            ).to(tl.float32)
            weight = None
            if W is not None:
                weight = tl.load(W + column, mask=column < VOCAB, other=0.0).to(tl.float32)
            dx = gradient_tile(
                x,
                is_own(lane, own, first),
                rest_factor,
                log_rest,
                own_gradient,
                weighted_factor,
                weight,
                mean_factor,
                total_log,
                mean,
                softcap,
                scale,
                CAPPED,
            )
            tl.store(y_rows + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def _finite(log):
    """A log, 0 in place of -inf: what is taken from it is -inf then, whose exponential is 0."""
    return tl.where(log == -float("inf"), 0.0, log)


def forward(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    *,
    device: Device,
    softcap: float,
    scale: float,
    weighted: bool,
    entropy: bool,
    predict: bool,
    in_place: bool,
    num_warps: int,
    block_rows: int = 1,
    block: int = 0,
    splits: int = 1,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Statistics of rows; see ``take_statistics`` for what the parameters mean."""
    rows = logits.shape[0]

    def row(asked: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return logits.new_empty(rows, dtype=dtype) if asked else None

    outputs = row(), row(), row(weighted), row(entropy), row(predict), row(predict, torch.int64)
    take_statistics(
        logits,
        dense_vector(target),
        dense_vector(class_weight) if weighted else None,
        outputs,
        device=device,
        softcap=softcap,
        scale=scale,
        ignored=None,
        num_warps=num_warps,
        block_rows=block_rows,
        block=block,
        splits=splits,
        programs_per_unit=programs_per_unit,
        num_stages=num_stages,
        waves_per_eu=waves_per_eu,
    )
    return outputs


def backward(
    g_log_rest: Tensor | None,
    g_target_logit: Tensor | None,
    g_weighted_sum: Tensor | None,
    g_mean_logit: Tensor | None,
    g_best: None,
    g_prediction: None,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    log_rest: Tensor,
    target_logit: Tensor,
    mean_logit: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    softcap: float,
    scale: float,
    weighted: bool,
    entropy: bool,
    predict: bool,
    in_place: bool,
    num_warps: int,
    block_rows: int = 1,
    block: int = 0,
    splits: int = 1,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None]:
    """The gradient from statistics as they are given; the parameters are those of forward."""
    if not needs[0]:
        return (None,)
    gradient, vocab = gradient_like(logits, in_place), logits.shape[-1]
    source, into, row_dims, strides = walk(logits, gradient)
    launch(
        _gradient,
        grid_of(len(logits), block_rows, splits, programs_per_unit, device),
        dense_vector(g_log_rest),
        dense_vector(g_target_logit),
        dense_vector(g_weighted_sum),
        dense_vector(g_mean_logit),
        source,
        dense_vector(target),
        dense_vector(class_weight) if g_weighted_sum is not None else None,
        dense_vector(log_rest),
        dense_vector(target_logit),
        dense_vector(mean_logit),
        into,
        len(logits),
        softcap,
        scale,
        *strides,
        VOCAB=vocab,
        BLOCK_ROWS=block_rows,
        BLOCK=block_for(vocab, block),
        SPLITS=splits,
        STAGES=num_stages,
        ROW_DIMS=row_dims,
        CAPPED=softcap != 0.0,
        **options_for(num_warps, waves_per_eu),
    )
    return (gradient if into is None or into is gradient else gradient.copy_(into),)
