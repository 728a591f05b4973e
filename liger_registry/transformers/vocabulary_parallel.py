"""Losses of an output head whose classes are spread over ranks, without logits, and without another rank's weights.

Each rank holds some rows of the head's weight and all hidden states. It takes the logsumexp of its own classes, and the
target's log-probability among them where the target is its own, from ``linear_logp``, slab by slab. Two all-reduces of
a few numbers a token make those of all classes of it. Backward exchanges the gradient of the hidden states alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_registry.errors import InvalidInputError, UnsupportedOptionError
from liger_registry.transformers._handles import call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_IGNORED = -100
_REDUCTIONS = ("mean", "sum", "none")


def vocabulary_parallel_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_start: int,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    scale: float = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """Each token's log-probability under a head whose classes are spread over the ranks of a group.

    Every rank calls it with the same hidden states and targets, and gets the same result. The gradient of hidden is
    summed over the ranks; those of weight and bias are the own classes'.

    Args:
        hidden: (..., hidden), floating.
        weight: (own classes, hidden), of the dtype of hidden: the classes from ``vocab_start`` on; ranks may have
            different numbers of them, and none.
        target: (...), int64, over all classes.
        group: the ranks; None for all.
        vocab_start: the index of this rank's first class.
        bias: (own classes,), or None.
        softcap: caps the scaled logits; 0 for none.
        scale: a factor on the logits, before the cap.
        ignore_index: the target of tokens that do not count, which get 0.

    Returns:
        (...), in fp32 (float64: float64); NaN where a target is no rank's class.

    Raises:
        InvalidInputError: shapes that do not fit.
    """
    _check(hidden, weight, target, vocab_start)
    if dist.get_world_size(group) > 1:
        hidden = SumOfGradients.apply(hidden, group)  # type: ignore[no-untyped-call]
    counted = target != ignore_index
    own = counted & (target >= vocab_start) & (target < vocab_start + weight.shape[0])
    if weight.shape[0]:
        place = torch.where(counted, torch.where(own, target - vocab_start, 0), _IGNORED)
        logp, logsumexp = call(
            "linear_logp", hidden, weight, place, bias, softcap=softcap, scale=scale, return_logsumexp=True
        )
    else:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        nothing = (hidden.sum(-1) + weight.sum() + (0.0 if bias is None else bias.sum())).to(wide) * 0
        logp, logsumexp = nothing, nothing - torch.inf
    joined: Tensor = _Joined.apply(logp, logsumexp, own, counted, group)  # type: ignore[no-untyped-call]
    return joined


def vocabulary_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_start: int,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Cross-entropy of a head whose classes are spread over the ranks of a group; the same on every rank.

    Args:
        hidden, weight, target, group, vocab_start, bias, softcap, scale, ignore_index: as in
            ``vocabulary_parallel_logp``.
        class_weight: (all classes,), or None.
        label_smoothing: must be 0: the mean over all classes is not exchanged.
        reduction: ``mean``, ``sum`` or ``none``; a mean over no tokens is 0.

    Returns:
        In fp32 (float64: float64), (...) for ``none``, else a scalar.

    Raises:
        InvalidInputError: shapes that do not fit.
        UnsupportedOptionError: label smoothing, or another reduction.
    """
    if label_smoothing:
        raise UnsupportedOptionError(
            f"vocabulary_parallel_cross_entropy has no label_smoothing={label_smoothing}",
            why="it needs the mean of the logits over the classes of all ranks",
            fix="leave it at 0, or gather the logits",
        )
    if reduction not in _REDUCTIONS:
        raise UnsupportedOptionError(f"there is no reduction {reduction!r}", candidates=_REDUCTIONS)
    logp = vocabulary_parallel_logp(
        hidden,
        weight,
        target,
        group,
        vocab_start=vocab_start,
        bias=bias,
        softcap=softcap,
        scale=scale,
        ignore_index=ignore_index,
    )
    counted = target != ignore_index
    factor = counted.to(logp.dtype)
    if class_weight is not None:
        factor = factor * class_weight.to(logp.dtype)[torch.where(counted, target, 0).clamp(0, len(class_weight) - 1)]
    loss = -logp * factor
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    size = factor.sum()
    return loss.sum() / torch.where(size == 0, 1.0, size)


class SumOfGradients(torch.autograd.Function):
    """A tensor that all ranks have alike, whose gradient is the sum of what each makes of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:  # noqa: ANN401
        """The tensor."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """The sum over the ranks."""
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Joined(torch.autograd.Function):
    """The log-probabilities among all classes, from those among each rank's."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logp: Tensor,
        logsumexp: Tensor,
        own: Tensor,
        counted: Tensor,
        group: ProcessGroup | None,
    ) -> Tensor:
        largest = logsumexp.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        above = logsumexp - largest
        share = above.exp()
        zero = torch.zeros_like(share)

        def of_owner(values: Tensor) -> Tensor:
            return torch.where(own, values, zero)

        # The owner's share apart from the others', so that a confident token's log-probability keeps its digits.
        rows = torch.where(own, zero, share), of_owner(share), of_owner(above), of_owner(logp), own.to(share.dtype)
        sums = torch.stack(rows)
        dist.all_reduce(sums, group=group)
        rest, owners, height, inner, owned = sums
        outer = torch.where(owners >= rest, -torch.log1p(rest / owners), height - (owners + rest).log())
        found = torch.where(owned == 1, inner + outer, torch.nan)
        ctx.save_for_backward(own, counted, rest, owners, share)
        return torch.where(counted, found, zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        own, counted, rest, owners, share = ctx.saved_tensors
        grad = torch.where(counted, grad, 0.0)
        whole = rest + owners
        of_logsumexp = torch.where(counted, grad * torch.where(own, rest, -share) / whole, 0.0)
        return torch.where(own, grad, 0.0), of_logsumexp, None, None, None


def _check(hidden: Tensor, weight: Tensor, target: Tensor, vocab_start: int) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise InvalidInputError(
            f"weight of shape {tuple(weight.shape)} does not fit hidden of width {hidden.shape[-1]}",
            fix="pass this rank's rows of the head's weight, (own classes, hidden)",
        )
    if target.shape != hidden.shape[:-1]:
        raise InvalidInputError(f"target has shape {tuple(target.shape)}, not {tuple(hidden.shape[:-1])}")
    if vocab_start < 0:
        raise InvalidInputError(f"vocab_start is {vocab_start}", fix="pass the index of this rank's first class")
