"""Recorded operations as the arguments of a loss over a linear head: its rows, a scale, a cap and a bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_registry.transformers.engine.recording import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class Folded:
    """Recorded operations as arguments of a loss: ``cap * tanh(before * z)``, or ``before * z``.

    ``z`` are the logits of ``rows`` plus ``bias``. Factors are kept as numerator and denominator, so that dividing by a
    cap and multiplying by it is 1.

    Attributes:
        rows: hidden states in place of the logits, their width where the classes were.
        classes: the dimension of the classes.
        bias: (vocab,), or None.
        before: the factor before the cap, or the only one.
        after: that behind the hyperbolic tangent; None where there is none.
        exact: whether what was left out of the rounding of the logits, if anything, keeps their order: casts alone do.
    """

    rows: Tensor
    classes: int
    bias: Tensor | None = None
    before: tuple[float, float] = (1.0, 1.0)
    after: tuple[float, float] | None = None
    exact: bool = True

    @property
    def softcap(self) -> float:
        """The cap, 0 for none."""
        return 0.0 if self.after is None else self.after[0] / self.after[1]

    @property
    def scale(self) -> float:
        """The factor before the cap, as the operations have it: ``cap * tanh(scale * z / cap)``."""
        after = self.after or (1.0, 1.0)
        return (self.before[0] * after[0]) / (self.before[1] * after[1])


def fold(node: Node, hidden: Tensor, raw: torch.dtype) -> Folded | None:
    """The recorded operations as arguments of a loss; None if they are not of that form.

    Args:
        node: the logits.
        hidden: what the head was called with.
        raw: the dtype in which the head gave them.
    """
    folded: Folded | None = Folded(hidden, hidden.dim() - 1)
    for step in node.steps:
        assert folded is not None
        folded = _FOLDS[step.operation](folded, step, raw)
        if folded is None:
            return None
    assert folded is not None
    if folded.after is not None and folded.softcap <= 0:
        return None
    return folded if math.isfinite(folded.scale) and folded.scale != 0 else None


def repeat_elementwise(node: Node, value: Tensor) -> Tensor:
    """The recorded operations that change values, on logits of the node's rows with the classes last."""
    for step in node.steps:
        if step.operation is aten.add.Tensor:
            value = value + step.args[0].reshape(-1)
        elif step.operation in _ELEMENTWISE:
            value = step.repeat(value)
    return value


def _keep(folded: Folded, step: Node, raw: torch.dtype) -> Folded:
    return folded


def _fold_cast(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    """A dtype that holds every number of the head's; in a narrower one the model would round again."""
    to, own = torch.finfo(step.meta.dtype), torch.finfo(raw)
    return folded if to.eps <= own.eps and to.max >= own.max else None


def _fold_factor(folded: Folded, step: Node, raw: torch.dtype) -> Folded:
    factor = float(step.args[0])
    over = step.operation in (aten.div.Tensor, aten.div.Scalar)
    numerator, denominator = folded.before if folded.after is None else folded.after
    changed = (numerator, denominator * factor) if over else (numerator * factor, denominator)
    if folded.after is None:
        return replace(folded, exact=False, before=changed)
    return replace(folded, exact=False, after=changed)


def _fold_tanh(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    return None if folded.after is not None else replace(folded, after=(1.0, 1.0), exact=False)


def _fold_bias(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    bias = step.args[0]
    plain = folded.bias is None and folded.exact and folded.classes == folded.rows.dim() - 1
    if not plain or step.meta.dtype != raw:
        return None
    return replace(folded, bias=bias.reshape(-1), exact=False)


def _fold_view(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    """Leading dimensions joined or parted, the classes still the last."""
    assert step.parent is not None
    before, after = step.parent.meta.shape, step.meta.shape
    if folded.classes != len(before) - 1 or not after or after[-1] != before[-1] or before[-1] == 0:
        return None
    rows = folded.rows.reshape(*after[:-1], folded.rows.shape[-1])
    return replace(folded, rows=rows, classes=rows.dim() - 1)


def _fold_expand(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    if folded.classes != folded.rows.dim() - 1:
        return None
    rows = folded.rows.expand(*step.meta.shape[:-1], folded.rows.shape[-1])
    return replace(folded, rows=rows, classes=rows.dim() - 1)


def _dimension(step: Node, position: int = 0) -> int:
    assert step.parent is not None
    given = step.args[position] if len(step.args) > position else step.kwargs.get("dim", 0)
    return int(given) % max(1, step.parent.meta.dim())


def _fold_along(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    """What takes rows along one dimension, which stays, goes (``select``, ``unbind``) or comes (``unsqueeze``)."""
    assert step.parent is not None
    operation, change = step.operation, step.meta.dim() - step.parent.meta.dim()
    if operation is aten.unsqueeze.default:
        dim = int(step.args[0]) % step.meta.dim()
        return replace(folded, rows=folded.rows.unsqueeze(dim), classes=folded.classes + (dim <= folded.classes))
    dim = _dimension(step, _DIM_OF.get(operation, 0))
    if dim == folded.classes:
        whole = operation is aten.slice.Tensor and step.meta.shape == step.parent.meta.shape
        # A slice of all classes in their order, as of models that cut off padding they do not have.
        return folded if whole and (len(step.args) < 4 or step.args[3] == 1) else None
    return replace(folded, rows=step.repeat(folded.rows), classes=folded.classes + change * (dim < folded.classes))


def _fold_squeeze(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    assert step.parent is not None
    sizes = step.parent.meta.shape
    given = step.args[0] if step.args else range(len(sizes))
    dims = [given] if isinstance(given, int) else list(given)
    gone = sorted({d % max(1, len(sizes)) for d in dims if sizes[d] == 1}, reverse=True)
    if folded.classes in gone:
        return None
    rows, classes = folded.rows, folded.classes
    for dim in gone:
        rows, classes = rows.squeeze(dim), classes - (dim < classes)
    return replace(folded, rows=rows, classes=classes)


def _fold_order(folded: Folded, step: Node, raw: torch.dtype) -> Folded:
    order = list(range(folded.rows.dim()))
    moved = step.repeat(torch.empty([1] * len(order), device="meta"))  # the operation checks its dimensions
    if step.operation is aten.permute.default:
        order = [d % len(order) for d in step.args[0]]
    elif step.operation is aten.transpose.int:
        first, second = (d % len(order) for d in step.args[:2])
        order[first], order[second] = order[second], order[first]
    else:
        order.reverse()
    assert moved.dim() == len(order)
    return replace(folded, rows=folded.rows.permute(order), classes=order.index(folded.classes))


def _fold_index(folded: Folded, step: Node, raw: torch.dtype) -> Folded | None:
    if folded.classes != folded.rows.dim() - 1 or len(step.args[0]) > folded.classes:
        return None
    rows = step.repeat(folded.rows)
    return replace(folded, rows=rows, classes=rows.dim() - 1)


_DIM_OF: dict[Any, int] = {aten.split.Tensor: 1, aten.split_with_sizes.default: 1}
_ELEMENTWISE = {
    aten._to_copy.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.tanh.default,
}
_FOLDS: dict[Any, Callable[[Folded, Node, torch.dtype], Folded | None]] = {
    **dict.fromkeys((aten.alias.default, aten.clone.default, aten.detach.default), _keep),
    aten._to_copy.default: _fold_cast,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar), _fold_factor),
    aten.tanh.default: _fold_tanh,
    aten.add.Tensor: _fold_bias,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _fold_view),
    **dict.fromkeys(
        (
            aten.slice.Tensor,
            aten.select.int,
            aten.unsqueeze.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
            aten.index_select.default,
        ),
        _fold_along,
    ),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _fold_squeeze),
    **dict.fromkeys((aten.transpose.int, aten.permute.default, aten.t.default), _fold_order),
    aten.expand.default: _fold_expand,
    aten.index.Tensor: _fold_index,
}
