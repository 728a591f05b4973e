"""What stands for the logits inside a graph that Dynamo traces, where no tensor of a class of its own can be made.

``TracedLogits`` is a plain object. Dynamo traces its methods, so that casts, views, scales and caps leave nothing in
the graph, and the cross-entropy of it is one operation. Where the graph ends Dynamo makes the object again, out of the
hidden states; used by code that is not traced it acts as deferred logits: all but ``isinstance`` takes it for them.

It is returned where a loss is to be expected, from heads in training that gradients flow through. What it does not know
becomes the real logits, in the graph.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_registry.transformers.engine.traced_loss import cross_entropy

if TYPE_CHECKING:
    from liger_registry.transformers.engine.deferred import DeferredLogits
    from liger_registry.transformers.engine.head import LogitsHead

Steps = tuple[tuple[str, Any], ...]
_WIDTHS = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}


def traced(head: LogitsHead, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """What a bound head gives while it is traced: an object where a loss is to be expected, else the real logits."""
    module = head.module
    hidden = args[0] if args else kwargs.get("input")
    if (
        len(args) + len(kwargs) != 1
        or not head.traceable
        or not torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or not (module.training and torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.requires_grad)
        # Hooks would see the object, and whatever gathers weights has none left for the loss.
        or module._forward_hooks
        or module._forward_pre_hooks
        or hasattr(module, "_hf_hook")
        or type(module.weight) is not torch.nn.Parameter
        or hidden.dim() == 0
    ):
        return F.linear(hidden, module.weight, module.bias)  # type: ignore[arg-type]
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    elif dtype != module.weight.dtype or dtype not in _WIDTHS:
        return F.linear(hidden, module.weight, module.bias)
    return TracedLogits(head, hidden, dtype, (), hidden.dim() - 1)


class TracedLogits:
    """Logits of a traced head that were left out; see the module.

    Args:
        head: the bound forward.
        rows: (..., hidden), hidden states, already as leading dimensions of the logits were changed.
        raw: the dtype in which the head gives its logits.
        steps: what else was done to them.
        classes: the dimension of the classes.
    """

    def __init__(self, head: LogitsHead, rows: Tensor, raw: torch.dtype, steps: Steps, classes: int) -> None:
        self.head, self.rows, self.raw, self.steps, self.classes = head, rows, raw, steps, classes
        self.tensor: Tensor | None = None

    # -- what it stands for --------------------------------------------------------------------------------------------

    def real(self) -> Tensor:
        """The logits: in a graph the real ones, else deferred ones."""
        if self.tensor is None:
            self.tensor = self._in_graph() if torch.compiler.is_dynamo_compiling() else self._deferred()
        return self.tensor

    def _in_graph(self) -> Tensor:
        return self._repeat(F.linear(self.rows, self.head.module.weight, self.head.module.bias))

    def _deferred(self) -> DeferredLogits:
        from liger_registry.transformers.engine.deferred import defer
        from liger_registry.transformers.engine.headcall import HeadCall
        from liger_registry.transformers.engine.late import traced_stamp

        head, module, rows = self.head, self.head.module, self.rows
        stamp = traced_stamp(module, rows)
        vocab = module.weight.shape[0]
        call = HeadCall(module, head.name, head.materialised, rows, self.raw, vocab, stamp)
        call.used = True
        return self._repeat(defer(call, module.weight, module.bias))  # type: ignore[return-value]

    def _repeat(self, logits: Tensor) -> Tensor:
        for name, value in self.steps:
            if name == "cast":
                logits = logits.to(value)
            elif name == "mul":
                logits = logits * value
            elif name == "div":
                logits = logits / value
            else:
                logits = torch.tanh(logits)
        return logits.movedim(-1, self.classes)

    def _having(self, rows: Tensor | None = None, step: tuple[str, Any] | None = None, classes: int = -1) -> Any:  # noqa: ANN401
        rows = self.rows if rows is None else rows
        steps = self.steps if step is None else (*self.steps, step)
        return TracedLogits(self.head, rows, self.raw, steps, self.classes if classes < 0 else classes)

    @property
    def _recording(self) -> bool:
        return self.tensor is None and torch.compiler.is_dynamo_compiling()

    @property
    def _last(self) -> bool:
        return self._recording and self.classes == self.rows.dim() - 1

    # -- metadata ------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """As of the logits."""
        sizes = list(self.rows.shape[:-1])
        sizes.insert(self.classes, self.head.module.weight.shape[0])
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401
        """As of the logits."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """As of the logits."""
        dtype = self.raw
        for name, value in self.steps:
            if name == "cast":
                dtype = value
        return dtype

    @property
    def device(self) -> torch.device:
        """As of the logits."""
        return self.rows.device

    @property
    def ndim(self) -> int:
        """As of the logits."""
        return self.rows.dim()

    @property
    def requires_grad(self) -> bool:
        """As of the logits."""
        return self.rows.requires_grad

    def dim(self) -> int:
        """As of the logits."""
        return self.rows.dim()

    def numel(self) -> int:
        """As of the logits."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """As of the logits."""
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"TracedLogits({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', of {self.head.name})"

    # -- what is recorded ----------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """A cast is recorded, and a move to where they are is none."""
        dtype = kwargs.get("dtype")
        others = [name for name in kwargs if name not in ("dtype", "device", "non_blocking")]
        device = kwargs.get("device")
        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)):
                device = value
            elif isinstance(value, (Tensor, TracedLogits)):
                dtype, device = value.dtype, value.device
        if device is not None and torch.device(device) != self.device:
            others = ["device"]
        if not self._recording or others:
            return self.real().to(*args, **kwargs)
        if dtype is None or dtype == self.dtype:
            return self
        if dtype not in _WIDTHS or (dtype != self.raw and _WIDTHS[dtype] <= _WIDTHS[self.raw]):
            return self.real().to(dtype)
        return self._having(step=("cast", dtype))

    def float(self) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self.to(torch.float32)

    def half(self) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self.to(torch.float16)

    def bfloat16(self) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self.to(torch.bfloat16)

    def double(self) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self.to(torch.float64)

    def type_as(self, other: Any) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self.to(other.dtype)

    def contiguous(self) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self if self._recording else self.real().contiguous()

    def view(self, *sizes: Any) -> Any:  # noqa: ANN401
        """Leading dimensions joined or parted are so of the hidden states."""
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = tuple(sizes[0])
        vocab = self.head.module.weight.shape[0]
        if not self._last or not sizes or isinstance(sizes[-1], torch.dtype) or sizes[-1] != vocab:
            return self.real().reshape(*sizes)
        rows = self.rows.reshape(*sizes[:-1], self.rows.shape[-1])
        return self._having(rows, classes=rows.dim() - 1)

    def reshape(self, *sizes: Any) -> Any:  # noqa: ANN401
        """As of a tensor."""
        return self.view(*sizes)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:  # noqa: ANN401
        """As of a tensor."""
        dim = self.rows.dim()
        start, end = start_dim % dim, end_dim % dim
        if not self._last or end >= self.classes:
            return self.real().flatten(start_dim, end_dim)
        rows = self.rows.flatten(start, end)
        return self._having(rows, classes=rows.dim() - 1)

    def transpose(self, first: int, second: int) -> Any:  # noqa: ANN401
        """The classes' dimension may be put elsewhere, as the loss of sequences wants it."""
        dim = self.rows.dim()
        first, second = first % dim, second % dim
        if not self._recording or dim != 3 or {first, second} != {1, 2} or self.classes == 0:
            return self.real().transpose(first, second)
        return self._having(classes=3 - self.classes)

    def permute(self, *dims: Any) -> Any:  # noqa: ANN401
        """As of a tensor."""
        order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        return self.transpose(1, 2) if order == (0, 2, 1) else self.real().permute(*order)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        keys = key if isinstance(key, tuple) else (key,)
        dots = sum(1 for k in keys if k is Ellipsis)
        plain = all(k is Ellipsis or isinstance(k, (int, slice)) for k in keys)
        if not self._last or not plain or dots > 1 or (dots == 0 and len(keys) > self.rows.dim()):
            return self.real()[key]
        last = keys[-1]
        if (dots and last is not Ellipsis) or (not dots and len(keys) == self.rows.dim()):
            whole = isinstance(last, slice) and last.start is None and last.stop is None and last.step in (None, 1)
            if not whole:
                return self.real()[key]
        rows = self.rows[key]
        return self._having(rows, classes=rows.dim() - 1)

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        self.real()[key] = value

    def tanh(self) -> Any:  # noqa: ANN401
        """The cap's inside is recorded, once."""
        if not self._recording or any(name == "tanh" for name, _ in self.steps):
            return self.real().tanh()
        return self._having(step=("tanh", None))

    def _factor(self, name: str, factor: Any) -> Any:  # noqa: ANN401
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not self._recording or not number or factor == 0 or not math.isfinite(factor):
            return NotImplemented
        return self._having(step=(name, float(factor)))

    def __mul__(self, other: Any) -> Any:  # noqa: ANN401
        found = self._factor("mul", other)
        return self.real() * other if found is NotImplemented else found

    def __rmul__(self, other: Any) -> Any:  # noqa: ANN401
        return self * other

    def __truediv__(self, other: Any) -> Any:  # noqa: ANN401
        found = self._factor("div", other)
        return self.real() / other if found is NotImplemented else found

    # -- everything else -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__") or name in ("head", "rows", "raw", "steps", "classes", "tensor"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = {} if kwargs is None else kwargs
        if args and isinstance(args[0], TracedLogits) and args[0]._recording:
            if func is F.cross_entropy:
                loss = cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
            elif func is torch.tanh and len(args) == 1 and not kwargs:
                return args[0].tanh()
        plain = [_plain(a) for a in args]
        return func(*plain, **{name: _plain(value) for name, value in kwargs.items()})

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        return self.real().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:  # noqa: ANN401
        return self.real().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __iter__(self) -> Any:  # noqa: ANN401
        return iter(self.real())


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, TracedLogits):
        return value.real()
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(v) for v in value])
    return value


def _binary(name: str) -> Any:  # noqa: ANN401
    def operator(self: TracedLogits, other: Any) -> Any:  # noqa: ANN401
        return getattr(self.real(), name)(_plain(other))

    operator.__name__ = name
    return operator


def _unary(name: str) -> Any:  # noqa: ANN401
    def operator(self: TracedLogits) -> Any:  # noqa: ANN401
        return getattr(self.real(), name)()

    operator.__name__ = name
    return operator


_BINARY = "add radd sub rsub rtruediv pow rpow mod matmul rmatmul lt le gt ge eq ne and or xor"
_UNARY = "neg pos abs invert bool int float index"
for _name in _BINARY.split():
    setattr(TracedLogits, f"__{_name}__", _binary(f"__{_name}__"))
for _name in _UNARY.split():
    setattr(TracedLogits, f"__{_name}__", _unary(f"__{_name}__"))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
