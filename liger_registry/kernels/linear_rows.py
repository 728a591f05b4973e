"""Losses over a linear head by slabs of rows, each with all columns of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from liger_registry.kernels.linear_products import (
    add_columns,
    add_product,
    cut_slab,
    logits_into,
    new_slab,
    row_slabs,
    wide,
)
from liger_registry.kernels.linear_slabs import Stage, Statistics, gradient, statistics
from liger_registry.kernels.token_loss import Factors


def over_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    stage: Stage,
    rows: int,
    options: Mapping[str, Any],
    kept: Tensor | None = None,
    then: Callable[[slice, Tensor, Tensor, Statistics], None] | None = None,
) -> Statistics:
    """The statistics of all rows that count from slabs of rows.

    Args:
        hidden: (tokens, hidden).
        weight: (vocab, hidden).
        target: (count,), int64, of the rows that count.
        bias: (vocab,), or None.
        class_weight: (vocab,) in the dtype of statistics, or None.
        stage: ``logit_statistics``.
        rows: of a slab.
        options: of the stage.
        kept: (count,), the rows that count; None for all.
        then: told of each slab's rows among those that count, its logits, its hidden states and its statistics, while
            the slab is there.
    """
    count, vocab = target.shape[0], weight.shape[0]
    memory = new_slab(hidden, min(rows, count), vocab)
    found: list[Statistics] = []
    for here in row_slabs(count, rows) if count else [slice(0, 0)]:
        slab = cut_slab(memory, here.stop - here.start, vocab)
        states = hidden[here] if kept is None else hidden.index_select(0, kept[here])
        logits_into(slab, states, weight, bias)
        found.append(statistics(stage, slab, target[here], class_weight, **options))
        if then is not None:
            then(here, slab, states, found[-1])
    if len(found) == 1:
        return found[0]
    names = ("log_rest", "target_logit", "weighted_sum", "mean_logit", "best", "prediction")
    columns = ([getattr(f, name) for f in found] for name in names)
    joined: list[Any] = [None if c[0] is None else torch.cat(c) for c in columns]
    return Statistics(*joined)


class RowGradients:
    """The gradients of a scalar loss, slab by slab as the statistics of its rows become known.

    Args:
        hidden: (tokens, hidden).
        weight: (vocab, hidden).
        target: (count,), of the rows that count.
        bias: (vocab,), or None.
        class_weight: (vocab,) in the dtype of statistics, or None.
        factors: of the rows that count.
        stage: the backward of ``logit_statistics``.
        options: of the stage.
        kept: (count,), the rows that count; None for all.
        needs: which gradients are needed, of hidden, weight and bias.
        sums: ``float32`` sums the head's gradient over the slabs in fp32, ``input`` in its own dtype.
        held: the dtype of the gradients, wider than the inputs' where what they are yet to be multiplied with makes
            them fit; None for the inputs'.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        factors: Factors,
        stage: Stage,
        options: Mapping[str, Any],
        kept: Tensor | None,
        needs: tuple[bool, ...],
        sums: str,
        held: torch.dtype | None = None,
    ) -> None:
        self.weight, self.target, self.class_weight, self.factors = weight, target, class_weight, factors
        self.stage, self.options, self.kept = stage, options, kept
        held = held or hidden.dtype
        summed = wide(hidden.dtype) if sums == "float32" else held
        empty = target.shape[0] == 0
        self.held = held
        self.hidden = self.head = self.bias = None
        if needs[0]:
            new = torch.zeros_like if kept is not None or empty else torch.empty_like
            self.hidden = new(hidden, dtype=held, memory_format=torch.contiguous_format)
        if needs[1]:
            self.head = weight.new_empty(weight.shape, dtype=summed)
        if needs[2] and bias is not None:
            self.bias = weight.new_empty(weight.shape[0], dtype=wide(hidden.dtype))

    def __call__(self, here: slice, slab: Tensor, states: Tensor, found: Statistics) -> None:
        """Turn a slab of logits into their gradient, and add what it makes."""
        if self.hidden is None and self.head is None and self.bias is None:
            return
        slopes = self.factors[here].slopes(found)
        gradient(self.stage, slab, self.target[here], self.class_weight, found, slopes, **self.options)
        first = here.start == 0
        if self.hidden is not None and slab.shape[0]:
            if self.kept is not None:
                self.hidden.index_copy_(0, self.kept[here], _product(slab, self.weight, self.held))
            else:
                add_product(self.hidden[here], slab, self.weight, True)
        if self.head is not None:
            add_product(self.head, slab.t(), states, first)
        if self.bias is not None:
            add_columns(self.bias, slab, first)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden, weight and bias, None for those not needed."""
        apart = self.factors.apart
        found = [self.hidden, self.head, self.bias]
        if apart is not None:
            found = [None if g is None else g.mul_(apart) for g in found]
        return tuple(None if g is None else g.to(self.held) for g in found)  # type: ignore[return-value]


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    total = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    add_product(total, left, right, True)
    return total
