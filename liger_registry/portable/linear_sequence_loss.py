"""``linear_sequence_loss`` slab by slab; the formula is that of ``ops.linear_sequence_loss``.

Matrix products are PyTorch's, and what happens to a slab of logits in between is a stage, ``logit_statistics``. Forward
functions return ``(loss, logp, held_hidden, held_weight, held_bias)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from liger_registry.kernels.compact import compact as rows_that_count
from liger_registry.kernels.compact import compact_groups
from liger_registry.kernels.group_loss import function_of, terms_and_slopes
from liger_registry.kernels.linear_products import cut_slab, logits_into, new_slab, scaled, wide
from liger_registry.kernels.linear_rows import RowGradients
from liger_registry.kernels.linear_slabs import (
    Slopes,
    Stage,
    Statistics,
    gradients_over_vocab,
    over_vocab,
    slopes_of,
    statistics,
)

if TYPE_CHECKING:
    from liger_registry import Device

    Stages = Mapping[str, Stage]
    Results = tuple[Tensor | None, ...]


def logp_of(found: Statistics, labels: Tensor, vocab: int, ignore_index: int) -> Tensor:
    """The log-probabilities of rows: 0 where ignored, NaN where the target is no class."""
    gap = found.log_rest - found.target_logit
    # Not softplus, which PyTorch cuts off at 20.
    logp = -torch.logaddexp(gap, torch.zeros_like(gap))
    logp = logp.masked_fill((labels < 0) | (labels >= vocab), torch.nan)
    return logp.masked_fill(labels == ignore_index, 0.0)


@dataclass(slots=True)
class Upstream:
    """The derivatives of the loss by a slab's log-probabilities, as ``RowGradients`` asks for them.

    Attributes:
        slopes_now: of the rows of the present slab.
        apart: nothing is left to multiply with at the end.
    """

    slopes_now: Tensor | None = None
    apart: None = None

    def __getitem__(self, rows: slice | Tensor) -> Upstream:
        """Those of the present slab, whose rows are asked for."""
        return self

    def slopes(self, found: Statistics) -> Slopes:
        """The derivatives by the statistics."""
        assert self.slopes_now is not None
        return slopes_of(found, -self.slopes_now, None)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of tokens by their groups.

    Attributes:
        ways: sequences of a group.
        length: tokens of a sequence.
        count: how many groups there are.
        kept: the rows that count, group by group, as positions in the order of groups; None for all.
        bounds: where the groups' rows begin among those, and end.
    """

    ways: int
    length: int
    count: int
    kept: Tensor | None
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, target: Tensor, ways: int, length: int, ignore_index: int, mode: str, size: int) -> Groups:
        """The groups of targets (tokens,), without those that are ignored where that is worth it."""
        rows = ways * length
        count = target.shape[0] // rows if rows else 0
        found = None
        if count:
            ordered = target.view(ways, count, length).transpose(0, 1).reshape(count, rows)
            found = compact_groups(ordered, ignore_index, mode, size)
        if found is None:
            return cls(ways, length, count, None, tuple(range(0, count * rows + 1, rows or 1)))
        return cls(ways, length, count, found[0], (0, *found[1]))

    def slabs(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Groups and their rows among those that count, as many groups as reach some number of rows."""
        first = 0
        for last in range(1, self.count + 1):
            if last == self.count or self.bounds[last] - self.bounds[first] >= rows:
                yield slice(first, last), slice(self.bounds[first], self.bounds[last])
                first = last

    def rows(self, device: torch.device) -> Tensor | None:
        """(rows that count,): which rows of the caller they are; None where they lie in the order of groups."""
        if self.kept is None and self.ways == 1:
            return None
        rows = torch.arange(self.count * self.ways * self.length, device=device) if self.kept is None else self.kept
        if self.ways == 1:
            return rows
        group, rest = rows // (self.ways * self.length), rows % (self.ways * self.length)
        return (rest // self.length * self.count + group) * self.length + rest % self.length

    def spread(self, values: Tensor, groups: slice, rows: slice) -> Tensor:
        """Numbers of a slab's rows as (ways, groups, length), 0 where rows do not count."""
        size = self.ways * self.length
        count = groups.stop - groups.start
        if self.kept is not None:
            place = self.kept[rows] - groups.start * size
            values = values.new_zeros(count * size).index_copy_(0, place, values)
        return values.view(count, self.ways, self.length).transpose(0, 1)

    def gathered(self, values: Tensor, groups: slice, rows: slice) -> Tensor:
        """Numbers (ways, groups, length) of a slab's rows that count."""
        flat = values.transpose(0, 1).reshape(-1)
        if self.kept is None:
            return flat
        return flat[self.kept[rows] - groups.start * self.ways * self.length]

    def split(self, tensor: Tensor) -> Tensor:
        """(tokens, ...) as (ways, groups, length, ...)."""
        return tensor.view(self.ways, self.count, self.length, *tensor.shape[1:])


def forward_group_slabs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    constants: Tensor,
    bias: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slab_rows: int,
    sums: str,
    function: str,
    settings: str,
    ways: int,
    length: int,
    softcap: float,
    scale: float,
    ignore_index: int,
    accumulate: str,
    compact: str,
) -> Results:
    """Loss and gradients from slabs of whole groups: their logits are computed once, three products in all."""
    states, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    known, vocab = constants.reshape(-1, constants.shape[-1]), weight.shape[0]
    groups = Groups.of(labels, ways, length, ignore_index, compact, states.numel() * vocab)
    order = groups.rows(labels.device)
    picked = labels if order is None else labels[order]
    told = {"softcap": softcap, "scale": scale, "weighted": False, "entropy": False}
    upstream = Upstream()
    stage, factors = stages["gradient"], cast(Any, upstream)
    grads = RowGradients(states, weight, picked, bias, None, factors, stage, told, order, needs, sums)
    loss = states.new_zeros((), dtype=wide(hidden.dtype))
    logp = loss.new_zeros(labels.shape[0])
    spans = [*groups.slabs(slab_rows)] or [(slice(0, 0), slice(0, 0))]
    memory = new_slab(states, max(rows.stop - rows.start for _, rows in spans), vocab)
    loss_of = function_of(function, settings)
    for here, rows in spans:
        slab = cut_slab(memory, rows.stop - rows.start, vocab)
        mine = states[rows] if order is None else states.index_select(0, order[rows])
        logits_into(slab, mine, weight, bias)
        found = statistics(stages["statistics"], slab, picked[rows], None, **told, predict=False)
        slopes = found.log_rest
        if groups.count:
            values = groups.spread(logp_of(found, picked[rows], vocab, ignore_index), here, rows)
            groups.split(logp)[:, here] = values
            total, slopes = terms_and_slopes(loss_of, values, groups.split(known)[:, here], any(needs))
            loss, slopes = loss + total, groups.gathered(slopes, here, rows)
        if rows.start == rows.stop and rows.start:
            continue  # groups of which no token counts have terms, but no gradient
        # Whatever the function makes of tokens that do not count.
        upstream.slopes_now = torch.where(picked[rows] == ignore_index, 0.0, slopes)
        grads(rows, slab, mine, found)
    return (loss, logp.view(target.shape), *_shaped(grads.results(), hidden))


def forward_vocab_slabs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    constants: Tensor,
    bias: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slabs: int,
    function: str,
    settings: str,
    ways: int,
    length: int,
    softcap: float,
    scale: float,
    ignore_index: int,
    accumulate: str,
    compact: str,
) -> Results:
    """Loss and gradients from slabs of the vocabulary, gone over twice: four products, and groups of any size."""
    states, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    known, vocab = constants.reshape(-1, constants.shape[-1]), weight.shape[0]
    kept = rows_that_count(labels, ignore_index, compact, states.numel() * vocab)
    rows, picked = (states, labels) if kept is None else (states.index_select(0, kept), labels[kept])
    told = {"softcap": softcap, "scale": scale, "weighted": False, "entropy": False}
    found = over_vocab(rows, weight, picked, bias, None, stages["statistics"], slabs, {**told, "predict": False})
    logp = logp_of(found, picked, vocab, ignore_index)
    if kept is not None:
        logp = logp.new_zeros(labels.shape[0]).index_copy_(0, kept, logp)
    groups = Groups(ways, length, labels.shape[0] // max(ways * length, 1), None, ())
    loss, slopes = logp.new_zeros(()), torch.zeros_like(logp)
    if groups.count:
        values, terms = groups.split(logp), groups.split(known)
        loss, slopes = terms_and_slopes(function_of(function, settings), values, terms, any(needs))
        slopes = slopes.reshape(-1)
    outputs = loss, logp.view(target.shape)
    if not any(needs):
        return (*outputs, None, None, None)
    slopes = torch.where(picked == ignore_index, 0.0, slopes if kept is None else slopes[kept])
    upstream, stage = slopes_of(found, -slopes, None), stages["gradient"]
    grad_rows, *others = gradients_over_vocab(
        rows, weight, picked, bias, None, found, upstream, stage, slabs, needs, told
    )
    if grad_rows is not None and kept is not None:
        grad_rows = grad_rows.new_zeros(states.shape).index_copy_(0, kept, grad_rows)
    return (*outputs, *_shaped((grad_rows, *others), hidden))


def _shaped(grads: Sequence[Tensor | None], hidden: Tensor) -> Results:
    """The gradients with that of the hidden states in their shape."""
    grad_hidden, *others = grads
    return (None if grad_hidden is None else grad_hidden.view(hidden.shape), *others)


def backward_scale(
    grad_loss: Tensor,
    grad_logp: None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    constants: Tensor,
    bias: Tensor | None,
    held_hidden: Tensor | None,
    held_weight: Tensor | None,
    held_bias: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool, ...],
    **options: Any,
) -> Results:
    """Forward's gradients times the loss', in fp32 and in their own memory, handed over."""
    held = (held_hidden, held_weight, held_bias)
    return tuple(
        scaled(g, grad_loss, g.dtype) if g is not None and need else None for g, need in zip(held, needs, strict=True)
    )
