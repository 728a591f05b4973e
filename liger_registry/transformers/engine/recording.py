"""What is done to logits before they are computed, recorded operation by operation.

A ``Node`` stands for logits that come from a head's call by some operations. Repeated on the real logits they give what
the model would have had, in its roundings; ``folding`` makes the arguments of a loss over the linear head of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.handle import PLAIN

if TYPE_CHECKING:
    from liger_registry.transformers.engine.headcall import HeadCall

aten = torch.ops.aten
Operation = Callable[..., Any]


class Node:
    """Logits, computed or not.

    Args:
        call: the head's call they come from.
        meta: their shape, strides and dtype, a tensor on the meta device.
        parent: what the operation was done to; None for the head's output itself.
        operation: the ATen operation.
        args, kwargs: its further arguments.
        index: which of its results this is, where it has several.
    """

    __slots__ = ("__weakref__", "args", "call", "index", "kwargs", "meta", "operation", "parent", "value")

    def __init__(
        self,
        call: HeadCall,
        meta: Tensor,
        parent: Node | None = None,
        operation: Operation | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        index: int | None = None,
    ) -> None:
        self.call, self.meta, self.parent, self.operation = call, meta, parent, operation
        self.args, self.kwargs, self.index = args, kwargs or {}, index
        self.value: Tensor | None = None
        call.nodes.append(weakref.ref(self))

    @property
    def steps(self) -> list[Node]:
        """The operations from the head's output to here, in order."""
        found, node = [], self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def repeat(self, value: Tensor) -> Tensor:
        """This node's operation on its parent's value."""
        assert self.operation is not None
        result = self.operation(value, *self.args, **self.kwargs)
        return result if self.index is None else result[self.index]  # type: ignore[no-any-return]


def record(node: Node, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Node] | None:
    """The results of an operation on recorded logits, one or several; None if it cannot be recorded.

    Args:
        node: the operation's first argument.
        operation: as of ``__torch_dispatch__``.
        args, kwargs: the further arguments.
    """
    accept = _ACCEPTS.get(operation)
    if accept is None:
        return None
    accepted = accept(node, args, kwargs)
    if accepted is None:
        return None
    args, kwargs = accepted
    on_meta = [_meta(a) for a in args]
    result = operation(node.meta, *on_meta, **{name: _meta(value) for name, value in kwargs.items()})
    if isinstance(result, Tensor):
        return [Node(node.call, result, node, operation, args, kwargs)]
    return [Node(node.call, meta, node, operation, args, kwargs, n) for n, meta in enumerate(result)]


def _meta(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return value.to("meta")
    return [_meta(v) for v in value] if isinstance(value, list) else value


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _as_given(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    return args, kwargs


def _cast(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """A cast to another floating dtype; not one to another device."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if device is not None and torch.device(device) != node.call.hidden.device:
        return None
    if (dtype is not None and not dtype.is_floating_point) or kwargs.get("pin_memory") or args:
        return None
    if kwargs.get("layout") not in (None, torch.strided):
        return None
    kept = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
    return (), kept


def _factor(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """A product with, or quotient by, one number: of Python, or a 0-dim tensor on the CPU that needs no gradient."""
    if len(args) != 1 or kwargs:
        return None
    factor = args[0]
    if isinstance(factor, Tensor):
        if factor.dim() or factor.requires_grad or factor.device.type != "cpu" or not factor.is_floating_point():
            return None
        factor = factor.item()
    number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    return ((factor,), {}) if number and math.isfinite(factor) and factor != 0 else None


def _class_bias(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The sum with one number a class, as encoder-decoder models add it to what their head gives."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return None
    bias, vocab = args[0], node.call.vocab
    alike = bias.dtype == node.meta.dtype and bias.device == node.call.hidden.device and type(bias) in PLAIN
    if not alike or bias.dim() == 0 or bias.shape[-1] != vocab or bias.numel() != vocab or bias.dim() > node.meta.dim():
        return None
    return args, kwargs


def _positions(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Indices or masks of leading dimensions; masks become indices, as PyTorch itself has them."""
    if len(args) != 1 or kwargs:
        return None
    indices: list[Tensor | None] = []
    for index in args[0]:
        if index is not None and (type(index) not in PLAIN or index.dtype not in (torch.int64, torch.bool)):
            return None
        if index is not None and index.dtype == torch.bool:
            start = len(indices)
            if tuple(index.shape) != tuple(node.meta.shape[start : start + index.dim()]):
                return None  # an error, which the real logits raise
            indices += index.nonzero().unbind(1)
        else:
            indices.append(None if index is None else index.clone())
    while indices and indices[-1] is None:
        indices.pop()
    return (indices,), {}


def _index(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if len(args) != 2 or kwargs or type(args[1]) not in PLAIN:
        return None
    return (args[0], args[1].clone()), {}


_ACCEPTS: dict[Any, Callable[[Node, tuple[Any, ...], dict[str, Any]], Arguments | None]] = {
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.clone.default,
            aten.detach.default,
            aten.tanh.default,
            aten.view.default,
            aten._unsafe_view.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.transpose.int,
            aten.permute.default,
            aten.t.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
            aten.expand.default,
        ),
        _as_given,
    ),
    aten._to_copy.default: _cast,
    aten.mul.Tensor: _factor,
    aten.mul.Scalar: _factor,
    aten.div.Tensor: _factor,
    aten.div.Scalar: _factor,
    aten.add.Tensor: _class_bias,
    aten.index.Tensor: _positions,
    aten.index_select.default: _index,
}
