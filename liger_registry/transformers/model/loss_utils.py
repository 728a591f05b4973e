"""The loss of a causal language model from its last hidden states."""

from __future__ import annotations

from typing import Any

import torch

from liger_registry.errors import InvalidInputError
from liger_registry.transformers import _losses
from liger_registry.transformers._arguments import refuse
from liger_registry.transformers.functional import CrossEntropyOutput

Tensor = torch.Tensor

# What LigerForCausalLMLoss passes on of what else a model's forward was called with.
_PASSED = frozenset({"bias", "ce_weight", "lse_square_scale", "label_smoothing", "accum_dtype", "use_token_scaling"})
# Arguments of the fused loss that are not this function's to take.
_REFUSED = ("reduction", "softcap", "return_z_loss", "chunk_mem_const")


def unpack_cross_entropy_result(
    result: Tensor | CrossEntropyOutput | tuple[Tensor | None, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(loss, z_loss, token_accuracy, predicted_tokens)`` of what a cross-entropy returned, None for absent ones."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    given = result if isinstance(result, tuple) else (result,)
    loss, z_loss, accuracy, predicted = (*given, None, None, None)[:4]
    return loss, z_loss, accuracy, predicted


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    use_token_scaling: bool = False,
) -> Tensor | CrossEntropyOutput:
    """``liger_fused_linear_cross_entropy`` as a mean over the tokens of one batch, or of several.

    Args:
        hidden_states: (tokens, hidden).
        lm_head_weight: (vocab, hidden).
        target: (tokens,), int64.
        num_items_in_batch: what the sum of the losses is divided by, a number or a tensor of one; by default the number
            of these tokens that count.
        ignore_index: the target of tokens that do not count.
        final_logit_softcapping: caps the logits by a tanh.
        accum_dtype: as of ``liger_fused_linear_cross_entropy``, like all that follow.
        return_token_accuracy: whether the share of right predictions is returned.
        return_predicted_tokens: whether the predictions are.
        bias: (vocab,), or None.
        ce_weight: (vocab,), or None.
        lse_square_scale: the factor of the squared logsumexp.
        label_smoothing: the share of the uniform distribution.
        use_token_scaling: each token's loss times its probability.

    Raises:
        UnsupportedOptionError: an option's value that is not supported.
        InvalidInputError: a ``num_items_in_batch`` of several numbers.
    """
    return _losses.fused_linear_cross_entropy(
        "fixed_fused_linear_cross_entropy",
        hidden_states,
        lm_head_weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        "mean",
        final_logit_softcapping,
        False,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
        None if num_items_in_batch is None else _losses.items(num_items_in_batch, hidden_states),
    )


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The loss of each token's next, from the hidden states that the head would be applied to.

    Args:
        hidden_states: (..., tokens, hidden).
        lm_head_weight: (vocab, hidden).
        labels: (..., tokens), int64; not looked at if ``shift_labels`` is given.
        hidden_size: the width of ``hidden_states``.
        num_items_in_batch: as of ``fixed_fused_linear_cross_entropy``.
        ignore_index: the label of tokens that do not count.
        shift_labels: (..., tokens), each token's next, instead of ``labels``.
        final_logit_softcapping: caps the logits by a tanh.
        return_token_accuracy: whether the share of right predictions is returned.
        return_predicted_tokens: whether the predictions are, (tokens of all batches,).
        kwargs: what a model's forward was called with. Arguments of ``fixed_fused_linear_cross_entropy`` count, those
            of other functions do not.

    Raises:
        UnsupportedOptionError: a reduction, a cap or a z-loss asked for by the names of the fused loss.
    """
    for name in _REFUSED:
        refuse(
            "LigerForCausalLMLoss",
            name,
            kwargs.get(name),
            "it returns a mean, capped by final_logit_softcapping, under a budget of memory",
            "call liger_fused_linear_cross_entropy",
        )
    if shift_labels is None:
        if labels is None:
            raise InvalidInputError("LigerForCausalLMLoss got no labels", fix="pass labels, or shift_labels")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in _PASSED},
    )
