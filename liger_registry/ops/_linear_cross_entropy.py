"""The formula of ``fused_linear_cross_entropy`` in plain PyTorch, and what its schemes save; see the contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.ops import _linear
from liger_registry.ops._logits import split_softmax, transformed, wide

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor | None, ...]


def formula(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    **options: Any,
) -> Tensors:
    """``(loss, z_loss, token_accuracy, predicted_tokens, log_rest, target_logit)``, None for what is not asked for."""
    import torch

    vocab = weight.shape[0]
    logits = _linear.head(hidden, weight, bias)
    z = transformed(logits, options["softcap"], options["scale"])
    log_rest, target_logit, there = split_softmax(z, target)
    counted = target != options["ignore_index"]
    # A factor, so that gradients are NaN too where a target is no class.
    valid = torch.where(there | ~counted, 1.0, torch.nan).to(z.dtype)
    own, every = torch.ones_like(log_rest), z.new_ones(vocab)
    if class_weight is not None:
        every = class_weight.to(z.dtype)
        own = every[target.clamp(0, vocab - 1)]
    gap, lse = log_rest - target_logit, torch.logaddexp(log_rest, target_logit)
    smoothing = options["label_smoothing"]
    loss = torch.logaddexp(gap, torch.zeros_like(gap)) * own * (1.0 - smoothing)
    if smoothing:
        loss = loss + (lse * every.sum() - (z * every).sum(-1)) * (smoothing / vocab)
    square = lse.square() * options["lse_square_scale"]
    loss, square = (torch.where(counted, part * valid, 0.0) for part in (loss, square))
    if options["reduction"] == "none":
        loss = loss + square
    else:
        loss, square = loss.sum(), square.sum()
        if options["reduction"] == "mean":
            first, second = divisors(target, counted & there, counted, own, class_weight, num_items)
            loss, square = loss / first, square / second
        loss = loss + square
    accuracy = predicted = None
    largest = transformed(logits.detach(), 0.0, options["scale"]).max(-1).indices
    if options["return_token_accuracy"]:
        accuracy = ((largest == target) & counted).to(z.dtype)
        if options["reduction"] != "none":
            accuracy = accuracy.sum() / counted.sum().clamp_min(1)
    if options["return_predicted_tokens"]:
        predicted = torch.where(counted, largest, -1)
    z_loss = square.detach() if options["return_z_loss"] else None
    kept = (torch.where(counted, s, 0.0).reshape(-1) for s in (log_rest, target_logit))
    return loss, z_loss, accuracy, predicted, *kept


def divisors(
    target: torch.Tensor,
    right: torch.Tensor,
    counted: torch.Tensor,
    own: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a mean divides the loss and the square by; infinity in place of 0, so that 0 is what is left."""
    import torch

    count = counted.sum().to(own.dtype)
    second = count if num_items is None else num_items.to(own.dtype)
    first = torch.where(right, own, 0.0).sum() if class_weight is not None and num_items is None else second
    return torch.where(first == 0, torch.inf, first), torch.where(second == 0, torch.inf, second)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    num_items: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    accumulate: str = "auto",
    compact: str = "auto",
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    scale: float = 1.0,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``loss``, and behind it the outputs that are asked for, in plain, differentiable PyTorch.

    Args:
        hidden: (..., hidden), floating.
        weight: (vocab, hidden), of the dtype of hidden.
        target: (...), int64.
        bias: (vocab,), or None.
        class_weight: (vocab,), or None for weights of 1.
        num_items: 0-dim, what the mean divides by in place of its own count.
        ignore_index: the target of tokens that do not count.
        label_smoothing: the part of the loss that all classes share.
        lse_square_scale: the factor of the logsumexp's square.
        softcap: caps the scaled logits; 0 for none.
        reduction: ``mean``, ``sum`` or ``none``.
        accumulate: the dtype in which the head's gradient is summed over slabs; concerns roundings alone.
        compact: whether ignored tokens are left out of the products; concerns time and memory alone.
        return_z_loss: whether ``z_loss`` is asked for.
        return_token_accuracy: whether ``token_accuracy`` is.
        return_predicted_tokens: whether ``predicted_tokens`` is.
        scale: a factor on the logits, before the cap.
    """
    found = formula(
        hidden,
        weight,
        target,
        bias,
        class_weight,
        num_items,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        reduction=reduction,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        scale=scale,
    )[:4]
    given = tuple(y for y in found if y is not None)
    return given if len(given) > 1 else given[0]


def held_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of gradients between forward and backward."""
    import torch

    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype


def grads_reference(*inputs: torch.Tensor | None, needs: tuple[bool, ...], **options: Any) -> Tensors:
    """Outputs, and the gradients of hidden, weight and bias for an upstream gradient of 1."""
    import torch

    from liger_registry.recompute import gradients

    hidden = inputs[0]
    assert hidden is not None
    with torch.no_grad():
        outputs = formula(*inputs, **options)[:4]  # type: ignore[arg-type]
    wanted = (needs[0], needs[1], False, needs[2], False, False)
    grads = [torch.ones_like(y) if n == 0 else None for n, y in enumerate(outputs) if y is not None]
    found = gradients(lambda *xs: reference(*xs, **options), inputs, grads, wanted)  # type: ignore[arg-type]
    held = [None if g is None else g.to(held_dtype(hidden)).contiguous() for g in (found[0], found[1], found[3])]
    return *outputs, *held


def grads_backward(*tensors: torch.Tensor | None, needs: tuple[bool, ...], **options: Any) -> Tensors:
    """The gradients that forward holds times that of the loss, in the inputs' dtype."""
    (grad_loss, *_), (hidden, *_), held = tensors[:4], tensors[4:10], tensors[10:]
    assert grad_loss is not None
    assert hidden is not None
    return tuple(
        (g.to(grad_loss.dtype) * grad_loss).to(hidden.dtype) if g is not None and need else None
        for g, need in zip(held, needs, strict=True)
    )


def recompute_reference(*inputs: torch.Tensor | None, **options: Any) -> Tensors:
    """Outputs and what backward reads of each token."""
    return formula(*inputs, **options)  # type: ignore[arg-type]


def _outputs(hidden: torch.Tensor, target: torch.Tensor, options: Mapping[str, Any]) -> Tensors:
    import torch

    shape = target.shape if options["reduction"] == "none" else ()

    def new(asked: bool) -> torch.Tensor | None:
        return hidden.new_empty(shape, dtype=wide(hidden.dtype)) if asked else None

    predicted = None
    if options["return_predicted_tokens"]:
        predicted = hidden.new_empty(target.shape, dtype=torch.int64)
    return new(True), new(options["return_z_loss"]), new(options["return_token_accuracy"]), predicted


def allocate_grads(*inputs: torch.Tensor | None, needs: tuple[bool, ...], **options: Any) -> Tensors:
    """Empty outputs and, contiguous, the gradients of hidden, weight and bias; None for those not needed."""
    hidden, weight, target, bias = inputs[:4]
    assert hidden is not None
    assert target is not None
    found = (
        hidden.new_empty(x.shape, dtype=held_dtype(hidden)) if x is not None and need else None
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    )
    return (*_outputs(hidden, target, options), *found)


def allocate_statistics(*inputs: torch.Tensor | None, **options: Any) -> Tensors:
    """Empty outputs, and (tokens,) of the two saved tensors."""
    hidden, _, target = inputs[:3]
    assert hidden is not None
    assert target is not None
    row = [hidden.new_empty(target.shape, dtype=wide(hidden.dtype)).view(-1) for _ in range(2)]
    return (*_outputs(hidden, target, options), *row)
