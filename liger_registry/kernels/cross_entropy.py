"""``cross_entropy`` in Triton; the formula is that of ``liger_registry.ops.cross_entropy``.

Forward takes ``(logits, target, class_weight, num_items)`` and returns ``(loss, z_loss, token_accuracy,
predicted_tokens, log_rest, target_logit, counts)``, None for what a call does not have; backward takes the gradients
of the first four, the inputs and the last three, and returns ``(grad_logits,)``.

Forward reads the logits once, for the statistics of rows; what is left is a number a row, and a launch or two over
them. Backward reads them once more and writes. Neither has a count on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_registry.kernels._cross_entropy_rows import finite, reciprocal, reduce_rows, softmax_split
from liger_registry.kernels._logit_grid import block_for, gradient_like, grid_of, options_for, walk
from liger_registry.kernels._logit_rows import take_statistics
from liger_registry.kernels._logits import gradient_tile, is_own, own_columns
from liger_registry.kernels._rows import column_offsets, dense_vector, row_ids, row_offsets
from liger_registry.launch import launch

if TYPE_CHECKING:
    from liger_registry.device import Device


@triton.jit(do_not_specialize=["rows", "ignored", "n1", "n2", "n3"])
def _gradient(
    G,
    X,
    TARGET,
    W,
    TOTAL,
    NUM_ITEMS,
    LOG_REST,
    TARGET_LOGIT,
    COUNTS,
    DX,
    rows,
    ignored,
    smoothing,
    square,
    softcap,
    VOCAB: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_DIMS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SQUARED: tl.constexpr,
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
    share, square_share = 1.0, 1.0
    if NUM_ITEMS is not None:
        share = reciprocal(tl.load(NUM_ITEMS).to(tl.float32))
        square_share = share
    elif COUNTS is not None:
        share = reciprocal(tl.load(COUNTS))
        square_share = reciprocal(tl.load(COUNTS + 1))
    smoothing = tl.cast(smoothing, tl.float32)
    square = tl.cast(square, tl.float32)
    part = tl.program_id(0) % SPLITS
    tiles = tl.cdiv(rows, BLOCK_ROWS)
    lane = tl.arange(0, BLOCK)
    for step in tl.range(tl.program_id(0) // SPLITS, tiles, tl.num_programs(0) // SPLITS, num_stages=1):
        # Backwards: the last rows are what the cache still holds of the forward.
        row = row_ids(tiles - 1 - step, rows, BLOCK_ROWS)
        active = row < tl.cast(rows, row.dtype)
        index = row.to(tl.int64)
        target = tl.load(TARGET + index, mask=active, other=-1)
        own = own_columns(target, VOCAB)
        counted = active & (target != ignored)
        valid = counted & (own >= 0)
        log_rest = tl.load(LOG_REST + index, mask=valid, other=0.0)
        target_logit = tl.load(TARGET_LOGIT + index, mask=valid, other=0.0)
        upstream = tl.load(G + index, mask=valid, other=0.0) if BY_ROW else tl.load(G)
        upstream = upstream.to(tl.float32)
        _, lse, rest_share, own_share = softmax_split(log_rest, target_logit)
        mine = upstream * share
        both = tl.zeros_like(log_rest)
        smooth = None
        if SMOOTHED:
            smooth = -mine * smoothing / VOCAB
            both = -smooth * (VOCAB if TOTAL is None else tl.load(TOTAL))
        if SQUARED:
            both += upstream * square_share * 2.0 * square * lse
        mine *= 1.0 - smoothing
        if W is not None:
            mine *= tl.load(W + own, mask=valid, other=0.0).to(tl.float32)
        rest_factor = mine + both
        own_gradient = -mine * rest_share
        if SMOOTHED or SQUARED:
            own_gradient += both * own_share
        # Rows that are not counted are written without being read; those of no class are NaN.
        rest_factor = tl.where(valid, rest_factor, tl.where(counted, float("nan"), 0.0))
        if SMOOTHED:
            smooth = tl.where(valid, smooth, 0.0)
        own = tl.where(valid, own, -1)
        rest_log = finite(lse)
        x_rows = X + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, x0, x1, x2, x3)[:, None]
        y_rows = DX + row_offsets(row, VOCAB, ROW_DIMS, n1, n2, n3, y0, y1, y2, y3)[:, None]
        for first in tl.range(part * BLOCK, VOCAB, SPLITS * BLOCK, num_stages=STAGES):
            column = first + lane
            inside = column < VOCAB
            x = tl.load(
                x_rows + column_offsets(column, x_column)[None, :],
                mask=valid[:, None] & inside[None, :],
                other=-float("inf"),
                eviction_policy="evict_first",
            ).to(tl.float32)
            weight = None
            if SMOOTHED and W is not None:
                weight = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
            dx = gradient_tile(
                x,
                is_own(lane, own, first),
                rest_factor,
                rest_log,
                own_gradient,
                smooth,
                weight,
                None,
                None,
                None,
                softcap,
                None,
                CAPPED,
            )
            tl.store(y_rows + column[None, :], dx.to(DX.dtype.element_ty), mask=active[:, None] & inside[None, :])


def forward(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    in_place: bool,
    num_warps: int,
    block_rows: int = 1,
    block: int = 0,
    splits: int = 1,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Statistics of rows, then their losses; see ``take_statistics`` for what the parameters mean."""
    shape, flat = target.shape, dense_vector(target.reshape(-1))
    rows, class_weight = flat.numel(), dense_vector(class_weight)

    def made(size: tuple[int, ...], asked: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return logits.new_empty(size, dtype=dtype) if asked else None

    log_rest, target_logit = made((rows,)), made((rows,))
    weighted_sum = made((rows,), label_smoothing != 0)
    prediction = made((rows,), return_token_accuracy or return_predicted_tokens, torch.int64)
    take_statistics(
        logits,
        flat,
        class_weight if label_smoothing else None,
        (log_rest, target_logit, weighted_sum, None, None, prediction),
        device=device,
        softcap=softcap,
        scale=None,
        ignored=ignore_index,
        num_warps=num_warps,
        block_rows=block_rows,
        block=block,
        splits=splits,
        programs_per_unit=programs_per_unit,
        num_stages=num_stages,
        waves_per_eu=waves_per_eu,
    )
    size = tuple(shape) if reduction == "none" else ()
    loss, z_loss, accuracy = made(size), made(size, return_z_loss), made(size, return_token_accuracy)
    counts = made((2,), reduction != "none")
    reduce_rows(
        flat,
        class_weight,
        _total(class_weight, label_smoothing),
        num_items,
        log_rest,
        target_logit,
        weighted_sum,
        prediction,
        loss,
        z_loss,
        accuracy,
        counts,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        vocab=logits.shape[-1],
        reduction=reduction,
    )
    tokens = prediction.view(shape) if prediction is not None and return_predicted_tokens else None
    return loss, z_loss, accuracy, tokens, log_rest, target_logit, counts


def _total(class_weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """The sum of the class weights, a scalar; None where none is needed."""
    return class_weight.sum(dtype=torch.float32) if class_weight is not None and label_smoothing else None


def backward(
    g_loss: Tensor | None,
    g_z_loss: None,
    g_token_accuracy: None,
    g_predicted_tokens: None,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    log_rest: Tensor,
    target_logit: Tensor,
    counts: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool],
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    in_place: bool,
    num_warps: int,
    block_rows: int = 1,
    block: int = 0,
    splits: int = 1,
    programs_per_unit: int = 0,
    num_stages: int = 1,
    waves_per_eu: int | None = None,
) -> tuple[Tensor | None]:
    """One read, one write; the parameters are those of forward."""
    if not needs[0] or g_loss is None:
        return (torch.zeros_like(logits) if needs[0] else None,)
    gradient, vocab, class_weight = gradient_like(logits, in_place), logits.shape[-1], dense_vector(class_weight)
    source, into, row_dims, strides = walk(logits, gradient)
    rows = target.numel()
    launch(
        _gradient,
        grid_of(rows, block_rows, splits, programs_per_unit, device),
        dense_vector(g_loss.reshape(-1)) if reduction == "none" else g_loss,
        source,
        dense_vector(target.reshape(-1)),
        class_weight,
        _total(class_weight, label_smoothing),
        num_items,
        dense_vector(log_rest),
        dense_vector(target_logit),
        dense_vector(counts) if reduction == "mean" else None,
        into,
        rows,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        softcap,
        *strides,
        VOCAB=vocab,
        BLOCK_ROWS=block_rows,
        BLOCK=block_for(vocab, block),
        SPLITS=splits,
        STAGES=num_stages,
        ROW_DIMS=row_dims,
        BY_ROW=reduction == "none",
        SMOOTHED=label_smoothing != 0,
        SQUARED=lse_square_scale != 0,
        CAPPED=softcap != 0,
        **options_for(num_warps, waves_per_eu),
    )
    return (gradient if into is None or into is gradient else gradient.copy_(into),)
