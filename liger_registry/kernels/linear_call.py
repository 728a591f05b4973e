"""A call of ``fused_linear_cross_entropy`` as matrices and vectors, and its outputs from the statistics of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_registry.kernels.compact import compact
from liger_registry.kernels.linear_products import wide
from liger_registry.kernels.linear_slabs import Statistics
from liger_registry.kernels.token_loss import Factors


@dataclass(frozen=True, slots=True)
class Call:
    """A call as matrices and vectors.

    Attributes:
        hidden: (tokens, hidden).
        weight: (vocab, hidden).
        bias: (vocab,), or None.
        target: (tokens,).
        class_weight: (vocab,) in the dtype of statistics, or None.
        num_items: 0-dim, or None.
        kept: the rows that count, None for all.
        labels: the targets of those.
        shape: of the caller's targets.
        options: the operation's.
        factors: of the rows that count, a ``Factors``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    num_items: Tensor | None
    kept: Tensor | None
    labels: Tensor
    shape: torch.Size
    options: Mapping[str, Any]
    factors: Any = None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        num_items: Tensor | None,
        options: Mapping[str, Any],
    ) -> Call:
        """The call of these inputs, with the rows that count picked out where that is worth it."""
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        class_weight = None if class_weight is None else class_weight.to(wide(hidden.dtype))
        size = rows.numel() * weight.shape[0]
        kept = compact(labels, options["ignore_index"], options["compact"], size)
        call = cls(
            rows,
            weight,
            bias,
            labels,
            class_weight,
            num_items,
            kept,
            labels if kept is None else labels[kept],
            target.shape,
            options,
        )
        return replace(call, factors=call.factors_of())

    def factors_of(self, apart: bool = False) -> Factors:
        """The factors of the rows that count; what is divided by does not depend on the others."""
        options = self.options
        return Factors.of(
            self.labels,
            self.class_weight,
            self.num_items,
            self.weight.shape[0],
            wide(self.hidden.dtype),
            ignore_index=options["ignore_index"],
            label_smoothing=options["label_smoothing"],
            lse_square_scale=options["lse_square_scale"],
            reduction=options["reduction"],
            apart=apart,
        )

    @property
    def held(self) -> torch.dtype:
        """The dtype of gradients between forward and backward: of many tokens they may be larger than fp16 holds."""
        dtype = self.hidden.dtype
        return wide(dtype) if dtype == torch.float16 else dtype

    @property
    def held_factors(self) -> Factors:
        """The factors of those gradients, in fp16 with a mean's division left for later."""
        found: Factors = self.factors
        return self.factors_of(apart=True) if self.hidden.dtype == torch.float16 else found

    @property
    def predicts(self) -> bool:
        """Whether any output needs the largest logit."""
        return bool(self.options["return_token_accuracy"] or self.options["return_predicted_tokens"])

    @property
    def stage_options(self) -> dict[str, Any]:
        """What statistics and gradient are both told."""
        options = self.options
        weighted = options["label_smoothing"] != 0
        return {"softcap": options["softcap"], "scale": options["scale"], "weighted": weighted, "entropy": False}

    @property
    def smoothing_weight(self) -> Tensor | None:
        """The class weights, where the stages need them."""
        return self.class_weight if self.options["label_smoothing"] else None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """hidden, weight, target, bias and the stages' class weights of the rows that count."""
        rows = self.hidden if self.kept is None else self.hidden.index_select(0, self.kept)
        return rows, self.weight, self.labels, self.bias, self.smoothing_weight

    def outputs(self, found: Statistics) -> tuple[Tensor | None, ...]:
        """``(loss, z_loss, token_accuracy, predicted_tokens)``, None for what was not asked for."""
        options, counted = self.options, self.factors.counted
        losses, squares = self.factors.losses(found)
        z_loss = accuracy = predicted = None
        if options["return_z_loss"]:
            z_loss = self.reduced(torch.zeros_like(losses) if squares is None else squares)
        if options["return_token_accuracy"]:
            right = ((found.prediction == self.labels) & counted).to(losses.dtype)
            accuracy = self.spread(right)
            if options["reduction"] != "none":
                accuracy = right.sum() / counted.sum().clamp_min(1)
        if options["return_predicted_tokens"]:
            assert found.prediction is not None
            predicted = self.spread(torch.where(counted, found.prediction, -1), -1)
        return self.reduced(losses), z_loss, accuracy, predicted

    def reduced(self, values: Tensor) -> Tensor:
        """Losses of the rows that count as the call returns them."""
        return self.spread(values) if self.options["reduction"] == "none" else values.sum()

    def spread(self, values: Tensor, fill: int = 0) -> Tensor:
        """Numbers of rows that count at the places of all rows."""
        if self.kept is None:
            return values.view(self.shape)
        found = values.new_full((self.target.shape[0],), fill)
        return found.index_copy_(0, self.kept, values).view(self.shape)
