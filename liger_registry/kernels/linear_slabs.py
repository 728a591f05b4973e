"""Losses over a linear head, slab by slab: matrix products of PyTorch around a stage on each slab of logits.

Two ways to cut ``hidden @ weight.T``: some rows of all columns, or some columns of all rows. Both reuse one slab of
memory, and the stage writes the gradient of the logits into it. Operands are matrices: hidden (tokens, hidden), weight
(vocab, hidden), bias (vocab,), targets and statistics (tokens,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_registry.kernels.linear_heuristics import slab_columns, stage_rows
from liger_registry.kernels.linear_products import (
    add_columns,
    add_product,
    cut_slab,
    logits_into,
    new_slab,
    row_slabs,
    wide,
)

Stage = Callable[..., tuple[Any, ...]]
#: A logsumexp beside which no logit counts; twice as much, times 0, is still 0.
FAR = 1e30


@dataclass(slots=True)
class Statistics:
    """What a loss knows of each row, (rows,) each; None for what was not asked for. See ``logit_statistics``."""

    log_rest: Tensor
    target_logit: Tensor
    weighted_sum: Tensor | None = None
    mean_logit: Tensor | None = None
    best: Tensor | None = None
    prediction: Tensor | None = None


def _pieces(slab: Tensor) -> list[slice]:
    """What a stage gets at once: all rows on a GPU; on a CPU few enough for its fp32 copies to stay small."""
    if slab.is_cuda:
        return [slice(0, slab.shape[0])]
    rows = stage_rows(slab.shape[1], wide(slab.dtype).itemsize)
    return [*row_slabs(slab.shape[0], rows)] or [slice(0, 0)]


def statistics(stage: Stage, slab: Tensor, target: Tensor, class_weight: Tensor | None, **options: Any) -> Statistics:
    """The statistics of a slab of logits."""
    found = [stage(slab[rows], target[rows], class_weight, in_place=False, **options)[:6] for rows in _pieces(slab)]
    if len(found) == 1:
        return Statistics(*found[0])
    columns: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True)]
    return Statistics(*columns)


@dataclass(frozen=True, slots=True)
class Slopes:
    """The derivatives of a loss by the statistics of each row, (rows,) each.

    Attributes:
        rest: by ``log_rest``.
        target: by ``target_logit``.
        total: by the logsumexp, of a row whose target is no column: ``rest`` without the factor ``1 - p``.
        logsumexp: of each row.
        weighted: by ``weighted_sum``.
        mean: by ``mean_logit``.
    """

    rest: Tensor
    target: Tensor
    total: Tensor
    logsumexp: Tensor
    weighted: Tensor | None = None
    mean: Tensor | None = None


def slopes_of(
    found: Statistics,
    loss: Tensor,
    logsumexp: Tensor | None,
    weighted: Tensor | None = None,
    mean: Tensor | None = None,
) -> Slopes:
    """The derivatives by statistics from those by what they make.

    Args:
        found: the statistics.
        loss: (rows,), by ``softplus(log_rest - target_logit)``, the target's negative log-probability.
        logsumexp: (rows,), by the logsumexp, or None.
        weighted: (rows,), by ``weighted_sum``.
        mean: (rows,), by ``mean_logit``.
    """
    gap = found.log_rest - found.target_logit
    # 1 - p of the target, to all digits however confident the row.
    own = torch.sigmoid(gap) * loss
    whole = torch.logaddexp(found.log_rest, found.target_logit)
    if logsumexp is None:
        return Slopes(own, -own, loss, whole, weighted, mean)
    rest = own + torch.sigmoid(gap) * logsumexp
    return Slopes(rest, torch.sigmoid(-gap) * logsumexp - own, loss + logsumexp, whole, weighted, mean)


def gradient(
    stage: Stage,
    slab: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    found: Statistics,
    slopes: Slopes,
    **options: Any,
) -> Tensor:
    """The gradient of a slab of logits, in the slab's memory."""

    def cut(vector: Tensor | None, rows: slice) -> Tensor | None:
        return None if vector is None else vector[rows]

    for rows in _pieces(slab):
        part = slab[rows]
        grads = [cut(v, rows) for v in (slopes.rest, slopes.target, slopes.weighted, slopes.mean)]
        kept = [cut(v, rows) for v in (found.log_rest, found.target_logit, found.mean_logit)]
        (result,) = stage(
            *grads,
            None,
            None,
            part,
            target[rows],
            class_weight,
            *kept,
            needs=(True,),
            predict=False,
            in_place=True,
            **options,
        )
        if result.data_ptr() != part.data_ptr():  # a stage may work in place, it need not
            part.copy_(result)
    return slab


def over_vocab(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    stage: Stage,
    slabs: int,
    options: Mapping[str, Any],
) -> Statistics:
    """The statistics of all rows from slabs of the vocabulary.

    Args:
        hidden: (rows, hidden).
        weight: (vocab, hidden).
        target: (rows,), int64.
        bias: (vocab,), or None.
        class_weight: (vocab,) in the dtype of statistics, or None.
        stage: ``logit_statistics``.
        slabs: of the vocabulary.
        options: of the stage.
    """
    vocab = weight.shape[0]
    columns = slab_columns(vocab, slabs)
    memory = new_slab(hidden, hidden.shape[0], columns)
    total: Statistics | None = None
    for start in range(0, vocab, columns):
        here = slice(start, min(start + columns, vocab))
        slab = cut_slab(memory, hidden.shape[0], here.stop - start)
        logits_into(slab, hidden, weight[here], None if bias is None else bias[here])
        weights = None if class_weight is None else class_weight[here]
        found = statistics(stage, slab, target - start, weights, **options)
        if found.prediction is not None:
            # By the logits before the cap, which, saturating, makes large ones equal.
            found.best = (
                slab.gather(1, found.prediction[:, None]).squeeze(1).to(found.log_rest.dtype) * options["scale"]
            )
            found.prediction = found.prediction + start
        if total is None:
            total = found
        else:
            _merge(total, found, target, start, here.stop)
    assert total is not None
    return total


def _merge(total: Statistics, found: Statistics, target: Tensor, start: int, stop: int) -> None:
    """Put the statistics of columns ``start`` to ``stop`` to those of all columns before them."""
    if total.mean_logit is not None:
        assert found.mean_logit is not None
        before = _logsumexp(total, (target >= 0) & (target < start))
        here = _logsumexp(found, (target >= start) & (target < stop))
        share = torch.sigmoid(here - before)
        moved = torch.lerp(total.mean_logit, found.mean_logit, share)
        # Columns of nothing but -inf have no mean.
        moved = torch.where(here == -torch.inf, total.mean_logit, moved)
        total.mean_logit = torch.where(before == -torch.inf, found.mean_logit, moved)
    total.log_rest = torch.logaddexp(total.log_rest, found.log_rest)
    total.target_logit = total.target_logit + found.target_logit
    if total.weighted_sum is not None:
        assert found.weighted_sum is not None
        total.weighted_sum = total.weighted_sum + found.weighted_sum
    if total.prediction is not None:
        assert total.best is not None
        assert found.best is not None
        assert found.prediction is not None
        # Of equal ones the first, which is in the lower slab.
        total.prediction = torch.where(found.best > total.best, found.prediction, total.prediction)
        total.best = torch.maximum(found.best, total.best)


def _logsumexp(found: Statistics, there: Tensor) -> Tensor:
    """The logsumexp of the columns that were seen; their statistics have the target apart where it is among them."""
    return torch.where(there, torch.logaddexp(found.log_rest, found.target_logit), found.log_rest)


def gradients_over_vocab(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    found: Statistics,
    slopes: Slopes,
    stage: Stage,
    slabs: int,
    needs: tuple[bool, ...],
    options: Mapping[str, Any],
    factor: Tensor | None = None,
    held: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, weight and bias from slabs of the vocabulary.

    Each row of the head's gradient is complete in one slab and rounded once; that of the hidden states sums over the
    slabs in fp32.

    Args:
        hidden: (rows, hidden).
        weight: (vocab, hidden).
        target: (rows,), int64.
        bias: (vocab,), or None.
        class_weight: (vocab,) in the dtype of statistics, or None.
        found: the statistics of whole rows.
        slopes: the derivatives by them.
        stage: the backward of ``logit_statistics``.
        slabs: of the vocabulary.
        needs: which of the three are needed.
        options: of the stage.
        factor: 0-dim, what the gradients are multiplied with at the end; None for nothing.
        held: the dtype of the gradients, where it is wider than the inputs'; None for theirs.

    Returns:
        The gradients, None for those not needed.
    """
    count, vocab, sums = hidden.shape[0], weight.shape[0], wide(hidden.dtype)
    held = held or hidden.dtype
    d_hidden = hidden.new_empty(hidden.shape, dtype=sums) if needs[0] else None
    d_weight = weight.new_empty(weight.shape, dtype=held) if needs[1] else None
    d_bias = weight.new_empty(vocab, dtype=held) if needs[2] and bias is not None else None
    columns = slab_columns(vocab, slabs)
    memory = new_slab(hidden, count, columns)
    for start in range(0, vocab, columns):
        here = slice(start, min(start + columns, vocab))
        slab = cut_slab(memory, count, here.stop - start)
        logits_into(slab, hidden, weight[here], None if bias is None else bias[here])
        # A row whose target is in another slab is one without: its softmax is over everything.
        inside = (target >= start) & (target < here.stop)
        local = Statistics(
            torch.where(inside, found.log_rest, slopes.logsumexp), found.target_logit, mean_logit=found.mean_logit
        )
        rest = torch.where(inside, slopes.rest, slopes.total)
        mine = Slopes(rest, slopes.target, slopes.total, slopes.logsumexp, slopes.weighted, slopes.mean)
        weights = None if class_weight is None else class_weight[here]
        gradient(stage, slab, target - start, weights, local, mine, **options)
        if d_hidden is not None:
            add_product(d_hidden, slab, weight[here], start == 0)
        if d_weight is not None:
            add_product(d_weight[here], slab.t(), hidden, True)
        if d_bias is not None:
            add_columns(d_bias[here], slab, True)
    found_all = [d_hidden, d_weight, d_bias]
    if factor is not None:
        found_all = [None if g is None else g.mul_(factor) for g in found_all]
    return tuple(None if g is None else g.to(held) for g in found_all)  # type: ignore[return-value]
