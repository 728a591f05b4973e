"""``cross_entropy`` in PyTorch operations; the formula is that of ``liger_registry.ops.cross_entropy``.

Forward takes ``(logits, target, class_weight, num_items)`` and returns ``(loss, z_loss, token_accuracy,
predicted_tokens, log_rest, target_logit, counts)``, None for what a call does not have; backward takes the gradients
of the first four, the inputs and the last three, and returns ``(grad_logits,)``. A target that is no class is never an
index: it is 0, and its row NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_registry.portable._logits import capped, rest_of, slope_into, target_columns, written

if TYPE_CHECKING:
    from liger_registry import Device

    Split = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward(
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
    fused: bool,
) -> tuple[Tensor | None, ...]:
    shape, vocab = target.shape, logits.shape[-1]
    rows, target = logits.reshape(-1, vocab), target.reshape(-1)
    z = capped(rows, softcap)
    counted, valid, index = _places(target, ignore_index, vocab)
    log_rest, target_logit = rest_of(z, valid[:, None], index[:, None], fused)
    log_rest.masked_fill_(~valid, 0.0)
    nll, lse, _, _ = _split(log_rest, target_logit)
    weights = None if class_weight is None else class_weight.to(z.dtype)
    weight = valid.to(z.dtype) if weights is None else weights[index].masked_fill_(~valid, 0.0)
    main = nll.mul_(weight)
    if label_smoothing:
        weighted = z.sum(-1) if weights is None else (z * weights).sum(-1)
        total = vocab if weights is None else weights.sum()
        main.mul_(1 - label_smoothing).add_(lse.mul(total).sub_(weighted), alpha=label_smoothing / vocab)
    nothing = torch.where(counted, torch.nan, torch.zeros_like(lse))
    main = torch.where(valid, main, nothing)
    squares = (
        torch.where(valid, lse.square().mul_(lse_square_scale), nothing)
        if lse_square_scale or return_z_loss
        else main.new_zeros(())
    )
    prediction = correct = None
    if return_token_accuracy or return_predicted_tokens:
        prediction = rows.max(-1).indices.masked_fill_(~valid, -1)
        correct = ((prediction == target) & valid).to(z.dtype)

    counts = None
    if reduction == "none":
        loss, z_loss, accuracy = (main + squares).view(shape), squares.expand(len(main)).reshape(shape), correct
    else:
        counts = torch.stack([weight.sum(), counted.sum().to(z.dtype)])
        items = counts if num_items is None else num_items.reshape(-1).to(z.dtype)
        whole = _inverse(items[-1])
        sums, square_sum = main.sum(), squares.sum()
        if reduction == "mean":
            sums, square_sum = sums * _inverse(items[0]), square_sum * whole
        loss, z_loss = sums + square_sum, square_sum
        accuracy = None if correct is None else correct.sum() * whole
    return (
        loss,
        z_loss if return_z_loss else None,
        accuracy.view(loss.shape) if accuracy is not None and return_token_accuracy else None,
        prediction.view(shape) if prediction is not None and return_predicted_tokens else None,
        log_rest,
        target_logit,
        counts,
    )


def _backward(
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
    fused: bool,
) -> tuple[Tensor | None]:
    if not needs[0] or g_loss is None:
        return (torch.zeros_like(logits) if needs[0] else None,)
    vocab = logits.shape[-1]
    rows, target = logits.reshape(-1, vocab), target.reshape(-1)
    z = capped(rows, softcap)
    counted, valid, index = _places(target, ignore_index, vocab)
    _, lse, rest_share, own_share = _split(log_rest, target_logit)
    upstream = g_loss.reshape(-1).to(z.dtype)
    share = square_share = upstream
    if reduction == "mean":
        items = counts if num_items is None else num_items.reshape(-1).to(z.dtype)
        assert items is not None
        share, square_share = upstream * _inverse(items[0]), upstream * _inverse(items[-1])
    weights = None if class_weight is None else class_weight.to(z.dtype)
    mine = share * (1 - label_smoothing) * (torch.ones_like(lse) if weights is None else weights[index])
    both, smooth = torch.zeros_like(lse), None
    if label_smoothing:
        smooth = (share * (label_smoothing / vocab)).expand(len(lse)).masked_fill(~valid, 0.0)
        both = both + smooth * (vocab if weights is None else weights.sum())
    if lse_square_scale:
        both = both + square_share * (2 * lse_square_scale) * lse
    factor = torch.where(valid, mine + both, torch.where(counted, torch.nan, torch.zeros_like(lse)))
    if fused:
        dz = torch.softmax(z, -1).mul_(factor[:, None])
    else:
        dz = torch.sub(z, lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp_().mul_(factor[:, None])
    own = both * own_share - mine * rest_share
    column = index[:, None]
    dz.scatter_(-1, column, torch.where(valid[:, None], own[:, None], dz.gather(-1, column)))
    if smooth is not None:
        dz.sub_(smooth[:, None] if weights is None else torch.outer(smooth, weights))
    slope_into(dz, rows, softcap)
    # Neither a row that is not counted nor its logits, which may be anything, take part.
    dz.masked_fill_(~counted[:, None], 0.0)
    return (written(dz.view(logits.shape), logits, in_place),)


def _places(target: Tensor, ignore_index: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows are counted, which of them have a class as target, and that class, else 0; each (rows,)."""
    counted = target != ignore_index
    there, index = target_columns(target, vocab)
    valid = counted & there.squeeze(-1)
    return counted, valid, index.squeeze(-1)


def _split(log_rest: Tensor, target_logit: Tensor) -> Split:
    """``-log p`` of the target, the logsumexp, and the shares of the rest and of the target."""
    difference = log_rest - target_logit
    nll = torch.logaddexp(difference, torch.zeros_like(difference))
    nll.masked_fill_(target_logit == torch.inf, torch.nan)
    return nll, torch.logaddexp(log_rest, target_logit), difference.sigmoid(), difference.neg().sigmoid_()


def _inverse(number: Tensor) -> Tensor:
    """1 / number, 0 of 0: nothing to count is no loss."""
    return number.reciprocal().masked_fill(number == 0, 0.0)


def forward_eager(*inputs: Tensor | None, device: Device, **options: object) -> tuple[Tensor | None, ...]:
    """The formula, one operation after the other."""
    return _forward(*inputs, device=device, fused=False, **options)  # type: ignore[arg-type]


def forward_functional(*inputs: Tensor | None, device: Device, **options: object) -> tuple[Tensor | None, ...]:
    """The formula with torch's logsumexp."""
    return _forward(*inputs, device=device, fused=True, **options)  # type: ignore[arg-type]


def backward_eager(*tensors: Tensor | None, device: Device, **options: object) -> tuple[Tensor | None]:
    """The derivative in the statistics' dtype, rounded once."""
    return _backward(*tensors, device=device, fused=False, **options)  # type: ignore[arg-type]


def backward_functional(*tensors: Tensor | None, device: Device, **options: object) -> tuple[Tensor | None]:
    """The derivative with torch's softmax."""
    return _backward(*tensors, device=device, fused=True, **options)  # type: ignore[arg-type]
