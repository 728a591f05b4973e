"""``linear_logp`` slab by slab; the formula is that of ``ops.linear_logp``.

Matrix products are PyTorch's, and what happens to a slab of logits in between is a stage, ``logit_statistics``. Forward
functions return ``(logp, logsumexp, entropy, argmax, log_rest, target_logit, mean_logit)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.kernels.compact import compact
from liger_registry.kernels.linear_rows import over_rows
from liger_registry.kernels.linear_slabs import FAR, Stage, Statistics, gradients_over_vocab, over_vocab, slopes_of

if TYPE_CHECKING:
    from liger_registry import Device

    Stages = Mapping[str, Stage]
    Results = tuple[Tensor | None, ...]


def _kept(hidden: Tensor, weight: Tensor, labels: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    return compact(labels, options["ignore_index"], options["compact"], hidden.numel() * weight.shape[0])


def _stage_options(options: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: options[name] for name in ("softcap", "scale")}
    return {**told, "weighted": False, "entropy": options["return_entropy"]}


def _results(
    found: Statistics, target: Tensor, labels: Tensor, kept: Tensor | None, vocab: int, options: Mapping[str, Any]
) -> Results:
    """Outputs and what backward reads, of all rows; ``labels`` are those of the rows that count."""
    counted = labels != options["ignore_index"]
    wrong = counted & ((labels < 0) | (labels >= vocab))

    def spread(values: Tensor, shape: torch.Size, fill: int = 0) -> Tensor:
        values = torch.where(counted, values, fill)
        if kept is not None:
            values = values.new_full((target.numel(),), fill).index_copy_(0, kept, values)
        return values.view(shape)

    def output(values: Tensor) -> Tensor:
        return spread(values.masked_fill(wrong, torch.nan), target.shape)

    flat = torch.Size((target.numel(),))
    gap = found.log_rest - found.target_logit
    whole = torch.logaddexp(found.log_rest, found.target_logit)
    # Not softplus, which PyTorch cuts off at 20.
    logp = output(-torch.logaddexp(gap, torch.zeros_like(gap)))
    logsumexp = output(whole) if options["return_logsumexp"] else None
    entropy = argmax = mean = None
    if options["return_entropy"]:
        assert found.mean_logit is not None
        entropy, mean = output(whole - found.mean_logit), spread(found.mean_logit, flat)
    if options["return_argmax"]:
        assert found.prediction is not None
        argmax = spread(found.prediction, target.shape, -1)
    return logp, logsumexp, entropy, argmax, spread(found.log_rest, flat), spread(found.target_logit, flat), mean


def forward_row_slabs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    slab_rows: int,
    **options: Any,
) -> Results:
    """Outputs and statistics from slabs of rows."""
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    kept = _kept(hidden, weight, labels, options)
    labels = labels if kept is None else labels[kept]
    asked = {**_stage_options(options), "predict": options["return_argmax"]}
    found = over_rows(rows, weight, labels, bias, None, stages["statistics"], slab_rows, asked, kept)
    return _results(found, target, labels, kept, weight.shape[0], options)


def forward_vocab_slabs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    slabs: int,
    **options: Any,
) -> Results:
    """Outputs and statistics from slabs of the vocabulary, put together as they come."""
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    kept = _kept(hidden, weight, labels, options)
    if kept is not None:
        rows, labels = rows.index_select(0, kept), labels[kept]
    asked = {**_stage_options(options), "predict": options["return_argmax"]}
    found = over_vocab(rows, weight, labels, bias, None, stages["statistics"], slabs, asked)
    return _results(found, target, labels, kept, weight.shape[0], options)


def backward_vocab_slabs(
    grad_logp: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_entropy: Tensor | None,
    grad_argmax: None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    log_rest: Tensor,
    target_logit: Tensor,
    mean_logit: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slabs: int,
    **options: Any,
) -> Results:
    """The gradients of hidden, weight and bias from slabs of the vocabulary, whose logits are computed again."""
    if not any(needs):
        return None, None, None
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    kept = _kept(hidden, weight, labels, options)
    if kept is not None:
        rows, labels = rows.index_select(0, kept), labels[kept]
    counted = labels != options["ignore_index"]
    wrong = counted & ((labels < 0) | (labels >= weight.shape[0]))

    def of_rows(values: Tensor | None) -> Tensor | None:
        if values is None or kept is None:
            return None if values is None else values.reshape(-1)
        return values.reshape(-1)[kept]

    def upstream(values: Tensor | None) -> Tensor | None:
        found = of_rows(values)
        return None if found is None else torch.where(counted, found, 0.0).masked_fill(wrong, torch.nan)

    logp, logsumexp, entropy = (upstream(g) for g in (grad_logp, grad_logsumexp, grad_entropy))
    whole = logsumexp
    if entropy is not None:
        whole = entropy if whole is None else whole + entropy
    rest, logit = of_rows(log_rest), of_rows(target_logit)
    assert rest is not None
    assert logit is not None
    # Ignored rows hold 0, of which large logits make infinity, and of that times 0 NaN.
    found = Statistics(rest.masked_fill(~counted, FAR), logit, mean_logit=of_rows(mean_logit))
    loss = torch.zeros_like(rest) if logp is None else -logp
    slopes = slopes_of(found, loss, whole, mean=None if entropy is None else -entropy)
    grad_hidden, *others = gradients_over_vocab(
        rows, weight, labels, bias, None, found, slopes, stages["gradient"], slabs, needs, _stage_options(options)
    )
    if grad_hidden is not None and kept is not None:
        full = grad_hidden.new_zeros((target.numel(), hidden.shape[-1]))
        grad_hidden = full.index_copy_(0, kept, grad_hidden)
    return (None if grad_hidden is None else grad_hidden.view(hidden.shape), *others)
