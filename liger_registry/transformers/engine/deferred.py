"""Logits that are not computed: a tensor by shape, dtype and graph, without data.

``DeferredLogits`` are what a bound head returns. Autograd records what is done to them as for any tensor: they are the
output of a node that knows the gradients of a linear layer. Below autograd nothing is computed: operations that a fused
loss can take up are recorded (``recording``), all others compute the real logits, once, and count it. So hooks,
``retain_grad``, views, wrappers that apply functions of their own, and gradients are PyTorch's.

``torch.nn.functional.cross_entropy`` of them is the fused loss (``loss``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from liger_registry.errors import AdapterError, RegistryWarning
from liger_registry.transformers.engine.headcall import HeadCall, untraced
from liger_registry.transformers.engine.recording import Node, record
from liger_registry.transformers.engine.spread import shards_of_logits

aten = torch.ops.aten
Function = Callable[..., Any]


class DeferredLogits(Tensor):
    """Logits of a head that were left out; see the module.

    Attributes:
        node: the call of the head they come from, and what was done to them since.
    """

    node: Node

    @staticmethod
    def __new__(cls: type[DeferredLogits], node: Node) -> DeferredLogits:
        """A tensor of the shape, strides and dtype that the node says, on the head's device."""
        meta = node.meta
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=node.call.hidden.device,
            requires_grad=False,
        )
        made.node = node
        return made

    def __init__(self, node: Node) -> None:
        """All is done in ``__new__``."""

    @property
    def is_computed(self) -> bool:
        """Whether the logits were computed after all, by something that read them."""
        return self.node.value is not None

    def computed(self) -> Tensor:
        """The logits as a plain tensor with its graph; computes them if that was not done yet.

        Raises:
            LateReadError: the weights have changed since the head was called.
        """
        made: Tensor = _Computed.apply(self)  # type: ignore[no-untyped-call]
        return made

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """What the hooks of tensor parallelism ask of a head's output: these logits stand for the gathered ones."""
        spread = self.node.call.spread if name in ("placements", "redistribute", "to_local") else None
        if spread is None or self.node.parent is not None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "to_local":
            return lambda: self
        if name == "redistribute":
            return lambda placements=None, **others: shards_of_logits(self.node.call, placements)
        from torch.distributed.tensor import Replicate

        return (Replicate(),)

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            answer = special(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            if func is aten.detach_.default:
                return first
            if func in _NEW:
                # Only what it is: the dtype and device of what is new.
                like = torch.empty((), dtype=first.dtype, device=first.device)
                return func(like, *args[1:], **kwargs)
            if not first.node.call.solid and not any(isinstance(a, DeferredLogits) for a in args[1:]):
                nodes = record(first.node, func, args[1:], kwargs)
                if nodes is not None:
                    made = [DeferredLogits(node) for node in nodes]
                    return made if nodes[0].index is not None else made[0]
            if not func._schema.is_mutable:
                # Without autograd's keys, as of tensors of inference mode, casts and reshapes come whole.
                made_of_parts = func.decompose(*args, **kwargs)
                if made_of_parts is not NotImplemented:
                    return made_of_parts
        return _run(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ANN401
        state = "computed" if self.is_computed else "not computed"
        return (
            f"DeferredLogits({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"of {self.node.call.name}, {state})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        return self.computed().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        return self.computed().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """An operation on the real logits; what it writes into, and what else shares that memory, stays one."""
    schema = func._schema
    if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
        if torch.Tag.inplace_view in func.tags:
            raise AdapterError(
                f"{func} cannot change the shape of deferred logits in place",
                fix="use the operation that returns a tensor, or compute them first: logits.computed()",
            )
        tree_map_only(DeferredLogits, lambda d: d.node.call.solidify(), (args, kwargs))

    plain, options = tree_map_only(DeferredLogits, lambda d: d.node.call.value(d.node), (args, kwargs))
    result = func(*plain, **options)
    if schema.is_mutable and isinstance(result, Tensor):
        for given, used in zip((*args, *kwargs.values()), (*plain, *options.values()), strict=True):
            if result is used:
                return given  # what is written in place is returned as it was given
    return result


_NEW = {aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default}


class Cell:
    """What passes from one node of a backward to the next beside the gradients."""

    __slots__ = ("grad", "zero")

    def __init__(self) -> None:
        self.grad: Tensor | None = None
        self.zero: Tensor | None = None


class HeadFunction(torch.autograd.Function):
    """Deferred logits as the output of a linear layer: it knows the layer's gradients, and nothing else.

    With a loss it is the way of that loss's gradient too: see ``loss.FusedLoss``.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        call: HeadCall,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor | None,
        cell: Cell | None,
    ) -> DeferredLogits:
        """The logits, not computed."""
        ctx.save_for_backward(hidden, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.cell, ctx.spread = cell, call.spread
        return DeferredLogits(Node(call, call.meta))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        """The gradients of the layer; of nothing but the loss where the logits' is the zero that stands for it."""
        cell: Cell | None = ctx.cell
        through = None
        if cell is not None:
            through, cell.grad = cell.grad, None
            if cell.zero is not None and grad.data_ptr() == cell.zero.data_ptr():
                return None, None, None, None, through, None
        hidden, weight = ctx.saved_tensors
        needs, spread = ctx.needs_input_grad, ctx.spread
        if spread is not None:
            grad = grad.narrow(-1, spread.start, spread.size)
        with torch.autocast(grad.device.type, enabled=False):
            flat = grad.reshape(-1, grad.shape[-1])
            grads: list[Tensor | None] = [None, None, None]
            if needs[1]:
                grads[0] = (grad @ weight.to(grad.dtype)).to(hidden.dtype)
                if spread is not None:
                    torch.distributed.all_reduce(grads[0], group=spread.group)
            if needs[2]:
                rows = hidden.reshape(-1, hidden.shape[-1]).to(grad.dtype)
                grads[1] = (flat.t() @ rows).to(weight.dtype)
            if needs[3]:
                grads[2] = flat.sum(0).to(ctx.bias_dtype)
        return None, *grads, through, None


class _Computed(torch.autograd.Function):
    """From deferred logits to the real ones."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits) -> Tensor:  # noqa: ANN401
        value: Tensor = deferred.node.call.value(deferred.node)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        return grad


def defer(
    call: HeadCall, weight: Tensor, bias: Tensor | None, loss: Tensor | None = None, cell: Cell | None = None
) -> DeferredLogits:
    """The logits of a call of a head, not computed, with a graph where one is wanted."""
    made: DeferredLogits = HeadFunction.apply(call, call.hidden, weight, bias, loss, cell)  # type: ignore[no-untyped-call]
    return made


# -- functions that are not operations on values ----------------------------------------------------------------------


def _cross_entropy(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    from liger_registry.transformers.engine.loss import cross_entropy

    return cross_entropy(*args, **kwargs)


def _argmax(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    from liger_registry.transformers.engine.loss import argmax

    return argmax(*args, **kwargs)


def _memory(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """What looks at the memory of a tensor: that of the real logits."""
    tree_map_only(DeferredLogits, lambda d: d.node.call.solidify(), (args, kwargs))
    args, kwargs = tree_map_only(DeferredLogits, lambda d: d.computed(), (args, kwargs))
    return func(*args, **kwargs)


def _watch(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Somebody wants the gradient of logits: their loss must go through them, unless it is a wrapper of the head."""
    deferred = args[0]
    hook = args[1] if len(args) > 1 else kwargs.get("hook")
    owner = getattr(hook, "func", hook)  # a partial's
    if isinstance(deferred, DeferredLogits) and not str(getattr(owner, "__module__", "")).startswith(_WRAPPERS):
        call = deferred.node.call
        call.watched = True
        if call.used:
            warnings.warn(
                f"no gradient will reach the logits of {call.name}: their loss was computed without them",
                RegistryWarning,
                stacklevel=3,
            )
    return NotImplemented


#: Whose hooks on outputs are there to gather parameters, and do not look at the gradient.
_WRAPPERS = ("torch.distributed.", "deepspeed.", "accelerate.", "colossalai.")

_SPECIAL: dict[Any, Function] = {
    F.cross_entropy: _cross_entropy,
    torch.argmax: _argmax,
    Tensor.argmax: _argmax,
    Tensor.register_hook: _watch,
    Tensor.retain_grad: _watch,
    **dict.fromkeys(
        (
            Tensor.numpy,
            Tensor.__array__,
            Tensor.tolist,
            Tensor.data_ptr,
            Tensor.untyped_storage,
            Tensor.storage,
            Tensor._typed_storage,
            Tensor.__dlpack__,
            Tensor.share_memory_,
            Tensor.as_subclass,
            Tensor.__cuda_array_interface__.__get__,
        ),
        _memory,
    ),
}
