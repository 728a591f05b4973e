"""Cross-entropy as the faces return it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from liger_registry.errors import InvalidInputError
from liger_registry.transformers._arguments import accumulation, cap, check_choice, check_loss
from liger_registry.transformers._handles import call

Tensor = torch.Tensor


@dataclass
class CrossEntropyOutput:
    """What a cross-entropy returns if more than the loss is asked for.

    Attributes:
        loss: 0-dim, or of the shape of the targets with ``reduction="none"``.
        z_loss: the part of the loss that is the squared logsumexp's, reduced alike; None if not asked for.
        token_accuracy: of the tokens that count the share whose largest logit is the target's, or 0 and 1 for each
            token with ``reduction="none"``; None if not asked for.
        predicted_tokens: the index of the largest logit, int64 of the shape of the targets, -1 for ignored tokens; None
            if not asked for.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _collected(found: Any, asked: Mapping[str, bool]) -> CrossEntropyOutput:  # noqa: ANN401
    rest = list(found) if isinstance(found, tuple) else [found]
    loss = rest.pop(0)
    parts = [rest.pop(0) if wanted else None for wanted in asked.values()]
    return CrossEntropyOutput(loss, *parts)


def _returned(output: CrossEntropyOutput, asked: Mapping[str, bool]) -> Tensor | CrossEntropyOutput:
    return output if any(asked.values()) else output.loss


def _asked(z_loss: bool, token_accuracy: bool, predicted_tokens: bool) -> dict[str, bool]:
    return {
        "return_z_loss": z_loss,
        "return_token_accuracy": token_accuracy,
        "return_predicted_tokens": predicted_tokens,
    }


def cross_entropy(
    face: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    lse_square_scale: float,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
) -> Tensor | CrossEntropyOutput:
    """The operation ``cross_entropy``; loss and z-loss rounded to the dtype of the logits, as torch and liger do."""
    check_loss(face, label_smoothing, reduction, softcap)
    asked = _asked(return_z_loss, return_token_accuracy, return_predicted_tokens)
    found = call(
        "cross_entropy",
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=cap(face, softcap),
        reduction=reduction,
        **asked,
    )
    output = _collected(found, asked)
    output.loss = output.loss.to(logits.dtype)
    if output.z_loss is not None:
        output.z_loss = output.z_loss.to(logits.dtype)
    return _returned(output, asked)


def fused_linear_cross_entropy(
    face: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    lse_square_scale: float,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    return_z_loss: bool,
    accum_dtype: torch.dtype | None,
    use_token_scaling: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    num_items: Tensor | None = None,
) -> Tensor | CrossEntropyOutput:
    """The operation ``fused_linear_cross_entropy``, or its sum over tokens that are scaled by their probabilities."""
    check_loss(face, label_smoothing, reduction, softcap)
    check_choice(face, "use_token_scaling", use_token_scaling, (False, True))
    asked = _asked(return_z_loss, return_token_accuracy, return_predicted_tokens)
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": cap(face, softcap),
        "accumulate": accumulation(face, accum_dtype, hidden),
    }
    if use_token_scaling:
        output = _scaled(
            hidden, weight, target, bias, class_weight, num_items, lse_square_scale, reduction, options, asked
        )
    else:
        found = call(
            "fused_linear_cross_entropy",
            hidden,
            weight,
            target,
            bias,
            class_weight,
            num_items,
            lse_square_scale=lse_square_scale,
            reduction=reduction,
            **options,
            **asked,
        )
        output = _collected(found, asked)
    return _returned(output, asked)


def _scaled(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    lse_square_scale: float,
    reduction: str,
    options: Mapping[str, Any],
    asked: Mapping[str, bool],
) -> CrossEntropyOutput:
    """Each token's loss times its target's probability, through which no gradient flows.

    The head's gradient is one product over all tokens here, so that ``accumulate`` has no slabs to sum over.
    """
    ignore_index = options["ignore_index"]
    counted = target != ignore_index
    accuracy, predicted = asked["return_token_accuracy"], asked["return_predicted_tokens"]
    found = call(
        "linear_logp",
        hidden,
        weight,
        target,
        bias,
        softcap=options["softcap"],
        ignore_index=ignore_index,
        return_logsumexp=lse_square_scale != 0,
        return_argmax=accuracy or predicted,
    )
    rest = list(found) if isinstance(found, tuple) else [found]
    logp = rest.pop(0)
    square = lse_square_scale * rest.pop(0).square() if lse_square_scale else torch.zeros_like(logp)
    own = torch.ones_like(logp)
    if class_weight is not None:
        own = class_weight.detach().to(logp.dtype)[target.clamp(0, weight.shape[0] - 1)]
    if options["label_smoothing"]:
        loss = call(
            "fused_linear_cross_entropy", hidden, weight, target, bias, class_weight, reduction="none", **options
        )
    else:
        loss = -logp * own
    p = torch.where(counted, logp.detach().exp(), 0.0)
    loss, square = loss * p, square * p
    count = counted.sum()
    if reduction != "none":
        loss, square = loss.sum(), square.sum()
    if reduction == "mean":
        first = second = count if num_items is None else num_items
        if class_weight is not None and num_items is None:
            first = torch.where(counted, own, 0.0).sum()
        loss, square = (x / torch.where(count == 0, 1.0, n.to(x.dtype)) for x, n in ((loss, first), (square, second)))
    output = CrossEntropyOutput(loss + square, square.detach() if asked["return_z_loss"] else None)
    if accuracy or predicted:
        largest = rest.pop(0)
        if predicted:
            output.predicted_tokens = largest
        if accuracy:
            right = ((largest == target) & counted).to(logp.dtype)
            output.token_accuracy = right if reduction == "none" else right.sum() / count.clamp_min(1)
    return output


def items(num_items: int | float | Tensor, hidden: Tensor) -> Tensor:
    """What a mean divides by as a 0-dim tensor beside ``hidden``.

    A number is filled in by a kernel, which a CUDA graph can hold, unlike a copy from the host.

    Raises:
        InvalidInputError: a tensor of several numbers.
    """
    if not isinstance(num_items, torch.Tensor):
        dtype = torch.int64 if isinstance(num_items, int) else torch.float32
        return torch.full((), num_items, dtype=dtype, device=hidden.device)
    if num_items.numel() != 1:
        raise InvalidInputError(
            f"num_items_in_batch has shape {tuple(num_items.shape)}",
            why="it is one number, what the sum of the losses is divided by",
            fix="pass its sum, or None",
        )
    return num_items.detach().reshape(()).to(hidden.device, non_blocking=True)
