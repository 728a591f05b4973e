"""Handles: what ``registry.get`` returns.

On a call a handle reads the few fields the operation declares, looks the rest up in a bounded memo and launches.
Everything else (binding, validation, choosing) is on the path of a miss.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad

from liger_registry.autograd import Entry, Special, Tensors, apply_fused
from liger_registry.calls import make_call
from liger_registry.config import Config
from liger_registry.decision import Decision
from liger_registry.device import Device
from liger_registry.dtensor import any_spread, call_on_shards
from liger_registry.explain import Explanations
from liger_registry.guards import make_guard, never
from liger_registry.library import LibraryFace, describe_face, terms_text, transform_error
from liger_registry.memo import keep
from liger_registry.op import Op, Scheme
from liger_registry.pins import current as pinned
from liger_registry.reference import reference_implementation

Tensor = torch.Tensor

# An entry is about 2.6 KiB with what it holds; training sees tens of shapes, a server of many lengths thousands.
MEMO = 4096
# Handles that a registry keeps; a program has some ten.
HANDLES = 1024
# Only these exact types take the eager face: a subclass has semantics of its own, which the library face keeps.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Memo(dict[Any, Entry]):
    """Resolved calls by their keys, and the last of them: its guard, and its entry by its state."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[Callable[..., bool], dict[Any, Entry]] = never, {}


class Chooser(Protocol):
    """What a handle asks for decisions; the registry is one."""

    def choose(
        self,
        op: Op,
        tensors: Tensors,
        options: Mapping[str, Any],
        phase: str,
        needs: Sequence[bool],
        pins: tuple[Any, ...],
        budget: int | None,
    ) -> tuple[Decision, Device]:
        """The decision for one phase of a call under a handle's pins and budget, and the device it is for."""

    def stages_of(self, pins: tuple[Any, ...] = ()) -> AbstractContextManager[None]:
        """Within it the chooser answers for the stages of composites."""

    @property
    def public(self) -> bool:
        """Whether it is the public registry."""

    @property
    def checking(self) -> bool:
        """Whether calls hold values against the contract."""

    def get(self, op: str, *, memory_budget: int | None = None, _pins: tuple[Any, ...] = ()) -> Handle:
        """The handle that a pickled one becomes."""

    def explain_call(self, handle: Handle, tensors: Tensors, options: Mapping[str, Any]) -> Explanations:
        """Why a call runs what it runs."""


class Handle:
    """A stable handle on an operation: call it like the function its contract describes.

    ``Handle`` itself is never called: ``make_handle`` gives each operation a class whose ``__call__`` is written for
    it.

    Args:
        op: the contract.
        chooser: decides.
        pins: what ``registry.get`` pinned for this handle.
        budget: its memory budget in bytes, overriding the operation's and the environment's.
    """

    def __init__(self, op: Op, chooser: Chooser, pins: tuple[Any, ...] = (), budget: int | None = None) -> None:
        self.op = op
        self.own_pins = pins
        self.budget = budget
        self._chooser = chooser
        self._memo = Memo()
        self.face = describe_face(op, terms_text(chooser, pins, budget, chooser.public))
        self._library = LibraryFace(self.face)
        self.__name__ = op.name
        self.__doc__ = op.doc

    def __repr__(self) -> str:
        pins = "".join(f", {target}={name}" for target, name, _ in self.own_pins)
        return f"<liger_registry handle of {self.op.name}{pins}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(self._chooser.get, self.op.name, memory_budget=self.budget, _pins=self.own_pins), ()

    def __deepcopy__(self, memo: object) -> Handle:
        return self  # a copied model asks the same registry

    __call__: Callable[..., Any]

    def forget(self) -> None:
        """Drop the memo; the next call of each shape asks the tiers again."""
        self._memo = Memo()

    def explain(self, *args: Any, **kwargs: Any) -> Explanations:
        """Why a call with these arguments would run what it runs; prints as text, ``to_json()`` gives it as data."""
        tensors, options = self.op.bind(args, kwargs)
        return self._chooser.explain_call(self, tensors, options)

    # -- before the memo ---------------------------------------------------------------------------------------------

    def _autocast(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """The call under ``torch.autocast``: inputs of the linear layer are cast as autocast would, then it is off."""
        tensors, options = self.op.bind(args, kwargs)
        device_type = next(t.device.type for t in tensors if t is not None)
        dtype = torch.get_autocast_dtype(device_type)
        cast = tuple(
            t.to(dtype) if t is not None and spec.name in self.op.autocast and t.dtype != torch.float64 else t
            for spec, t in zip(self.op.inputs, tensors, strict=True)
        )
        with torch.autocast(device_type, enabled=False):
            return self(*cast, **options)

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Hold values against the contract; waits for the device."""
        tensors, options = self.op.bind(args, kwargs)
        self.op.validate(tensors, options)
        if self.op.check_values is not None:
            self.op.check_values(tensors, options)

    # -- misses ----------------------------------------------------------------------------------------------------

    def _miss(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        tensors, options = self.op.bind(args, kwargs)
        given = [t for t in tensors if t is not None]
        if torch._C._are_functorch_transforms_active():
            raise transform_error("vmap, jvp and the other transforms of torch.func")
        if forward_ad._current_level >= 0 and any(_tangent(t) is not None for t in given):
            raise transform_error("forward-mode differentiation (jvp)")
        if (
            torch._C._len_torch_dispatch_stack()
            or not _harmless_function_modes()
            or any(type(t) not in PLAIN or t.is_meta for t in given)
        ):
            if any_spread(given):
                return call_on_shards(self.op.name, self, tensors, options)
            return self._library.call(tensors, options)
        memo = self._memo  # the one from before: what was decided while it was forgotten is forgotten with it
        entry = self._resolve(tensors, options)
        if key is not None and not capturing(given):
            keep(memo, key, entry, MEMO)
        if entry.backward is None:
            return entry.run(*tensors)
        return apply_fused(entry, *tensors)

    def needs(self, tensors: Tensors) -> tuple[bool, ...]:
        """Which differentiable inputs need a gradient in a call."""
        enabled = torch.is_grad_enabled()
        pairs = zip(self.op.inputs, tensors, strict=True)
        return tuple(enabled and t is not None and t.requires_grad for spec, t in pairs if spec.differentiable)

    def _resolve(self, tensors: Tensors, options: dict[str, Any]) -> Entry:
        op, needs = self.op, self.needs(tensors)
        forward, device = self._chooser.choose(op, tensors, options, "forward", needs, self.own_pins, self.budget)
        scheme = op.scheme(forward.problem.scheme)
        backward = None
        if any(needs):
            backward, _ = self._chooser.choose(op, tensors, options, "backward", needs, self.own_pins, self.budget)
        with self._chooser.stages_of(self.own_pins):
            return _entry(op, scheme, forward, backward, device, tensors, options, needs)


class Handles:
    """The handles of a registry by what was asked for, of which the oldest make room.

    A budget that a caller works out anew for each step is another handle each time. Those that made room are still
    known for as long as somebody holds them: they have to forget with the others.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Handle] = {}
        self._known: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.get = self._kept.get

    def __len__(self) -> int:
        return len(self._kept)

    def setdefault(self, key: object, handle: Handle) -> Handle:
        """The handle there is, else this one from now on."""
        with self._lock:
            if (there := self._kept.get(key)) is not None:
                return there
            keep(self._kept, key, handle, HANDLES)
            self._known.add(handle)
            return handle

    def values(self) -> list[Handle]:
        """Every handle that is kept, or held by somebody."""
        with self._lock:
            return list(self._known)


_classes: dict[str, tuple[Op, type[Handle]]] = {}


def make_handle(op: Op, chooser: Chooser, pins: tuple[Any, ...] = (), budget: int | None = None) -> Handle:
    """A handle on an operation, of the class whose ``__call__`` is written for it; arguments as of ``Handle``."""
    known = _classes.get(op.name)
    if known is None or known[0] is not op:
        scope = {
            "lr_compiling": torch.compiler.is_dynamo_compiling,
            # One C call of about 40 ns each; the public functions that wrap them cost two to five times that.
            "lr_grad_enabled": torch.is_grad_enabled,
            "lr_deterministic": torch._C._get_deterministic_algorithms,
            "lr_function_modes": torch._C._len_torch_function_stack,
            "lr_mode_types": _mode_types,
            "lr_dispatch_modes": torch._C._len_torch_dispatch_stack,
            "lr_functorch": torch._C._are_functorch_transforms_active,
            "lr_forward_ad": forward_ad,
            "lr_pins": pinned.get,
            "lr_autocast": torch.is_autocast_enabled,
            "lr_apply": apply_fused,
        }
        known = _classes[op.name] = op, type(f"{op.name}_handle", (Handle,), {"__call__": make_call(op, scope)})
    return known[1](op, chooser, pins, budget)


def _entry(
    op: Op,
    scheme: Scheme,
    forward: Decision,
    backward: Decision | None,
    device: Device,
    tensors: Tensors,
    options: dict[str, Any],
    needs: tuple[bool, ...],
) -> Entry:
    def told(decision: Decision) -> tuple[bool, ...] | None:
        return needs if op.takes_needs(decision.problem.phase, scheme.name) else None

    def bound(decision: Decision) -> Callable[..., tuple[Any, ...]]:
        return decision.implementation.bind(decision.config, device, options, told(decision), decision.problem)

    def plain(decision: Decision) -> Callable[..., tuple[Any, ...]]:
        return reference_implementation(op, decision.problem).bind(Config(), device, options, told(decision))

    names = [i.name for i in op.inputs]
    differentiable = op.differentiable
    return Entry(
        forward=bound(forward),
        fallback=plain(forward),
        backward=None if backward is None else bound(backward),
        fallback_backward=None if backward is None else plain(backward),
        outputs=len(op.outputs),
        special=_special(op, scheme, options),
        saved_inputs=tuple(names.index(name) for name in scheme.saved_inputs),
        gradients=tuple(differentiable.index(n) if n in differentiable else None for n in names),
        guard=make_guard(tensors),
    )


def _special(op: Op, scheme: Scheme, options: Mapping[str, Any]) -> Special | None:
    if not (op.asked or op.constant or scheme.saved_outputs or scheme.owned or op.overwrites):
        return None
    present = op.outputs_of(options)
    return Special(
        present=tuple(op.outputs.index(name) for name in present),
        constant=tuple(n for n, name in enumerate(present) if name in op.constant),
        saved_outputs=tuple(op.outputs.index(name) for name in scheme.saved_outputs),
        owned=len(scheme.owned),
        once=any(options[option] for option in op.overwrites.values()),
    )


def _mode_types() -> tuple[type, ...]:
    """The types of the active function modes; in the key, since a count does not tell a default device from others."""
    return tuple(type(torch._C._get_function_stack_at(i)) for i in range(torch._C._len_torch_function_stack()))


def _harmless_function_modes() -> bool:
    """Whether the only function modes are default devices (``torch.set_default_device``): our calls are not theirs."""
    from torch.utils._device import DeviceContext

    return all(issubclass(mode, DeviceContext) for mode in _mode_types())


def _tangent(tensor: Tensor) -> object:
    return forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]


def capturing(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the current stream is being captured into a graph, where some of the tensors are a GPU's."""
    return any(t is not None and t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()
