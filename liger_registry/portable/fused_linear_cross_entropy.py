"""``fused_linear_cross_entropy`` slab by slab; the formula is that of ``ops.fused_linear_cross_entropy``.

Matrix products are PyTorch's, and what happens to a slab of logits in between is a stage, ``logit_statistics``. Forward
functions of scheme ``grad_in_forward`` return ``(loss, z_loss, token_accuracy, predicted_tokens, grad_hidden,
grad_weight, grad_bias)``, those of ``recompute`` ``(..., log_rest, target_logit)`` behind the same outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.kernels.linear_call import Call
from liger_registry.kernels.linear_products import scaled
from liger_registry.kernels.linear_rows import RowGradients, over_rows
from liger_registry.kernels.linear_slabs import FAR, Stage, Statistics, gradients_over_vocab, over_vocab

if TYPE_CHECKING:
    from liger_registry import Device

    Stages = Mapping[str, Stage]
    Results = tuple[Tensor | None, ...]


def _forward_rows(call: Call, hidden: Tensor, stages: Stages, needs: tuple[bool, ...], rows: int, sums: str) -> Results:
    told = call.stage_options
    grads = RowGradients(
        call.hidden,
        call.weight,
        call.labels,
        call.bias,
        call.smoothing_weight,
        call.held_factors,
        stages["gradient"],
        told,
        call.kept,
        needs,
        sums,
        call.held,
    )
    asked = {**told, "predict": call.predicts}
    operands = (call.hidden, call.weight, call.labels, call.bias, call.smoothing_weight)
    found = over_rows(*operands, stages["statistics"], rows, asked, call.kept, grads)
    grad_hidden, *others = grads.results()
    return (*call.outputs(found), None if grad_hidden is None else grad_hidden.view(hidden.shape), *others)


def forward_single(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    **options: Any,
) -> Results:
    """Outputs and gradients from one slab of all rows."""
    call = Call.of(hidden, weight, target, bias, class_weight, num_items, options)
    return _forward_rows(call, hidden, stages, needs, max(call.labels.shape[0], 1), "input")


def forward_chunked(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slab_rows: int,
    sums: str,
    **options: Any,
) -> Results:
    """Outputs and gradients from slabs of rows, over which the head's gradient is summed."""
    call = Call.of(hidden, weight, target, bias, class_weight, num_items, options)
    return _forward_rows(call, hidden, stages, needs, slab_rows, sums)


def forward_vocab_slabs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slabs: int,
    **options: Any,
) -> Results:
    """Outputs and gradients from slabs of the vocabulary, gone over twice: four products, and no sum of heads."""
    call = Call.of(hidden, weight, target, bias, class_weight, num_items, options)
    operands = call.operands
    told = call.stage_options
    asked = {**told, "predict": call.predicts}
    found = over_vocab(*operands, stages["statistics"], slabs, asked)
    if not any(needs):
        return (*call.outputs(found), None, None, None)
    factors = call.held_factors
    slopes = factors.slopes(found)
    grads = gradients_over_vocab(
        *operands,
        found,
        slopes,
        stages["gradient"],
        slabs,
        needs,
        told,
        factors.apart,
        call.held,
    )
    return (*call.outputs(found), *_placed(call, hidden, grads))


def _placed(call: Call, hidden: Tensor, grads: tuple[Tensor | None, ...]) -> Results:
    """Gradients with that of the hidden states in the shape of all of them, 0 where rows do not count."""
    grad_hidden, *others = grads
    if grad_hidden is not None and call.kept is not None:
        found = grad_hidden.new_zeros(call.hidden.shape)
        grad_hidden = found.index_copy_(0, call.kept, grad_hidden)
    return (None if grad_hidden is None else grad_hidden.view(hidden.shape), *others)


def backward_scale(
    grad_loss: Tensor,
    grad_z_loss: None,
    grad_token_accuracy: None,
    grad_predicted_tokens: None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool, ...],
    **options: Any,
) -> Results:
    """Forward's gradients times the loss', in fp32 and in their own memory, handed over."""
    held, inputs = (grad_hidden, grad_weight, grad_bias), (hidden, weight, bias)
    return tuple(
        scaled(g, grad_loss, x.dtype) if g is not None and x is not None and need else None
        for g, x, need in zip(held, inputs, needs, strict=True)
    )


def forward_recompute_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    slab_rows: int,
    **options: Any,
) -> Results:
    """Outputs and statistics from slabs of rows."""
    call = Call.of(hidden, weight, target, bias, class_weight, num_items, options)
    asked = {**call.stage_options, "predict": call.predicts}
    operands = (call.hidden, weight, call.labels, bias, call.smoothing_weight)
    return _kept(call, over_rows(*operands, stages["statistics"], slab_rows, asked, call.kept))


def forward_recompute_vocab(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    stages: Stages,
    slabs: int,
    **options: Any,
) -> Results:
    """Outputs and statistics from slabs of the vocabulary."""
    call = Call.of(hidden, weight, target, bias, class_weight, num_items, options)
    operands = call.operands
    asked = {**call.stage_options, "predict": call.predicts}
    return _kept(call, over_vocab(*operands, stages["statistics"], slabs, asked))


def _kept(call: Call, found: Statistics) -> Results:
    counted = call.factors.counted
    saved = (call.spread(torch.where(counted, s, 0.0)).view(-1) for s in (found.log_rest, found.target_logit))
    return (*call.outputs(found), *saved)


def backward_vocab_slabs(
    grad_loss: Tensor,
    grad_z_loss: None,
    grad_token_accuracy: None,
    grad_predicted_tokens: None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    log_rest: Tensor,
    target_logit: Tensor,
    *,
    device: Device,
    stages: Stages,
    needs: tuple[bool, ...],
    slabs: int,
    **options: Any,
) -> Results:
    """The gradients from slabs of the vocabulary, whose logits are computed again."""
    if not any(needs):
        return None, None, None
    call = Call.of(hidden, weight, target, bias, class_weight, num_items, options)
    upstream = grad_loss.reshape(-1) if options["reduction"] == "none" else grad_loss
    if call.kept is not None:
        log_rest, target_logit = log_rest[call.kept], target_logit[call.kept]
        upstream = upstream[call.kept] if options["reduction"] == "none" else upstream
    # Ignored rows hold 0, of which large logits make infinity, and of that times 0 NaN.
    found = Statistics(log_rest.masked_fill(~call.factors.counted, FAR), target_logit)
    slopes = call.factors.slopes(found, upstream)
    operands = call.operands
    grads = gradients_over_vocab(
        *operands,
        found,
        slopes,
        stages["gradient"],
        slabs,
        needs,
        call.stage_options,
    )
    return _placed(call, hidden, grads)
