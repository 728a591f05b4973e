"""Both faces of an operation, built from its contract: the eager one here, the ``torch.library`` one in ``library``.

A ``Handle`` is what ``registry.get`` returns. On a call it reads the few fields the operation declares, looks the rest
up in a bounded memo and launches. Everything else (binding, validation, choosing) is on the path of a miss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad

from liger_registry.calls import make_call
from liger_registry.config import Config
from liger_registry.decision import Decision
from liger_registry.device import Device
from liger_registry.explain import Explanations
from liger_registry.launch import NotLoaded
from liger_registry.library import LibraryFace, describe_face, terms_text, transform_error
from liger_registry.op import Op, Scheme
from liger_registry.pins import current as pinned
from liger_registry.reference import reference_implementation

Tensor = torch.Tensor
Tensors = tuple[torch.Tensor | None, ...]

# An entry is about 2.6 KiB with what it holds; training sees tens of shapes, a server of many lengths thousands.
MEMO = 4096
# Only these exact types take the eager face: a subclass has semantics of its own, which the library face keeps.
PLAIN = (torch.Tensor, torch.nn.Parameter)


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

    @property
    def public(self) -> bool:
        """Whether it is the public registry."""

    def get(self, op: str, *, memory_budget: int | None = None, _pins: tuple[Any, ...] = ()) -> Handle:
        """The handle that a pickled one becomes."""

    def explain_call(self, handle: Handle, tensors: Tensors, options: Mapping[str, Any]) -> Explanations:
        """Why a call runs what it runs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that was resolved: what a hit of the memo needs.

    Attributes:
        forward: ``(*inputs)`` to outputs and saved tensors.
        fallback: the same in plain PyTorch, for a launch whose binary is not loaded while a stream is being captured.
        backward: ``(*grad_outputs, *saved_inputs, *saved)`` to gradients; None if nothing needs one.
        fallback_backward: the same in plain PyTorch.
        outputs: how many of forward's results are outputs.
        saved_inputs: positions of the inputs that backward reads.
        gradients: for each input the position of its gradient among backward's results; None if not differentiable.
    """

    forward: Callable[..., tuple[Any, ...]]
    fallback: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]] | None
    fallback_backward: Callable[..., tuple[Any, ...]] | None
    outputs: int
    saved_inputs: tuple[int, ...]
    gradients: tuple[int | None, ...]

    def run(self, *tensors: Tensor | None) -> Any:  # noqa: ANN401 - a tensor, or a tuple where there are several outputs
        """The outputs, without a graph."""
        results = self.run_forward(solid(tensors))
        return results[0] if self.outputs == 1 else results[: self.outputs]

    def run_forward(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Outputs and saved tensors from the inputs."""
        try:
            return self.forward(*tensors)
        except NotLoaded:
            return self.fallback(*tensors)

    def run_backward(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """The gradients from ``(*grad_outputs, *saved_inputs, *saved)``."""
        assert self.backward is not None
        assert self.fallback_backward is not None
        try:
            return self.backward(*tensors)
        except NotLoaded:
            return self.fallback_backward(*tensors)


class Fused(torch.autograd.Function):
    """The eager face: one autograd node for any operation, its decisions carried in the entry."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *tensors: Tensor | None) -> Any:  # noqa: ANN401
        """Run the forward phase and save what its scheme says."""
        tensors = solid(tensors)
        results = entry.run_forward(tensors)
        count = entry.outputs
        ctx.save_for_backward(*[tensors[i] for i in entry.saved_inputs], *results[count:])
        ctx.entry = entry
        return results[0] if count == 1 else results[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401
        """Run the backward phase that was chosen before forward ran."""
        entry = ctx.entry
        grads = tuple(_materialized(grad) for grad in grads)
        if torch.is_grad_enabled():  # create_graph: what runs inside must not record, and what comes out must not lie
            with torch.no_grad():
                found = entry.run_backward(*grads, *ctx.saved_tensors)
            found = once(found, (*grads, *ctx.saved_tensors))
        else:
            found = entry.run_backward(*grads, *ctx.saved_tensors)
        return (None, *[None if i is None else found[i] for i in entry.gradients])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ANN401
        """Forward-mode differentiation is refused by name."""
        raise transform_error("forward-mode differentiation (jvp)")


# torch.autograd.Function.apply is a Python function that looks for torch.func's transforms before it calls this one. A
# handle has looked already, as part of its key, and without the second look a small call takes 30 % less.
apply_fused: Callable[..., Any] = super(torch.autograd.Function, Fused).apply


class _Once(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated: under ``create_graph`` a silent zero would be wrong."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ANN401
        return tuple(t.view_as(t) for t in tensors[:count] if t is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        raise transform_error("double backward")


def once(gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, connected to what they came from by a node that raises when it is differentiated."""
    given = [g for g in gradients if g is not None]
    linked = _Once.apply(len(given), *given, *sources)  # type: ignore[no-untyped-call]
    passed = iter(linked)
    return tuple(None if g is None else next(passed) for g in gradients)


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
        self._memo: dict[Any, Entry] = {}
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

    def forget(self) -> None:
        """Drop the memo; the next call of each shape asks the tiers again."""
        self._memo = {}

    def explain(self, *args: Any, **kwargs: Any) -> Explanations:
        """Why a call with these arguments would run what it runs; prints as text, ``to_json()`` gives it as data."""
        tensors, options = self.op.bind(args, kwargs)
        return self._chooser.explain_call(self, tensors, options)

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
            return self._library.call(tensors, options)
        memo = self._memo  # the one from before: what was decided while it was forgotten is forgotten with it
        entry = self._resolve(tensors, options)
        if key is not None and not _capturing(given[0]):
            if len(memo) >= MEMO:
                with suppress(RuntimeError, StopIteration):  # another thread changes it too, and then makes room
                    memo.pop(next(iter(memo)), None)
            memo[key] = entry
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
        return _entry(op, scheme, forward, backward, device, options, needs)


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
    options: dict[str, Any],
    needs: tuple[bool, ...],
) -> Entry:
    def plain(decision: Decision, needs: tuple[bool, ...] | None) -> Callable[..., tuple[Any, ...]]:
        return reference_implementation(op, decision.problem).bind(Config(), device, options, needs)

    names = [i.name for i in op.inputs]
    differentiable = op.differentiable
    return Entry(
        forward=forward.implementation.bind(forward.config, device, options),
        fallback=plain(forward, None),
        backward=backward.implementation.bind(backward.config, device, options, needs)
        if backward is not None
        else None,
        fallback_backward=plain(backward, needs) if backward is not None else None,
        outputs=len(op.outputs),
        saved_inputs=tuple(names.index(name) for name in scheme.saved_inputs),
        gradients=tuple(differentiable.index(n) if n in differentiable else None for n in names),
    )


def _mode_types() -> tuple[type, ...]:
    """The types of the active function modes; in the key, since a count does not tell a default device from others."""
    return tuple(type(torch._C._get_function_stack_at(i)) for i in range(torch._C._len_torch_function_stack()))


def _harmless_function_modes() -> bool:
    """Whether the only function modes are default devices (``torch.set_default_device``): our calls are not theirs."""
    from torch.utils._device import DeviceContext

    return all(issubclass(mode, DeviceContext) for mode in _mode_types())


def solid(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Inputs whose memory holds their values; the same tuple in all but contrived cases."""
    for tensor in tensors:
        if tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()):
            return tuple(None if t is None else t.resolve_neg().clone() for t in tensors)
    return tensors


def _materialized(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values: not a negated view, not a zero without memory, not one of a batch."""
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # is_grads_batched, jacobian(vectorize=True)
        raise transform_error("batched gradients (vmap over backward)")
    if tensor.is_neg() or tensor._is_zerotensor():
        return tensor.resolve_neg().clone()
    return tensor


def _tangent(tensor: Tensor) -> object:
    return forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
