"""The ``torch.library`` face of an operation: for compile, export, FakeTensor, modes and tensor subclasses.

Each scheme of an operation is two library operators, forward and backward, with fake implementations that follow from
the scheme alone. Nothing is decided while tracing: the real kernel chooses when it runs. It costs 20 to 37 us a call
more than the eager face, so it is never the eager path.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.errors import UnsupportedTransformError
from liger_registry.launch import NotLoaded
from liger_registry.op import Op
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.reference import reference_implementation

NAMESPACE = "liger_registry"
_KINDS = {float: "float", int: "int", bool: "bool", str: "str"}
Tensors = tuple[torch.Tensor | None, ...]
# The forward operator's name, its arguments' names and defaults, the number of outputs, and the terms.
Face = tuple[str, tuple[str, ...], tuple[Any, ...], int, str]

# An operator is defined once a process, and a graph that was traced outlives the handle it was traced from: what a
# handle adds to a call (pins, budget, a registry other than the public one) travels as the operator's last argument, a
# text.
_defined: dict[str, LibraryOperators] = {}
_defining = threading.Lock()
_choosers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def terms_text(chooser: Any, pins: tuple[Any, ...], budget: int | None, public: bool) -> str:  # noqa: ANN401
    """What a handle adds to a call, as text; empty for a plain handle of the public registry."""
    _choosers[0 if public else id(chooser)] = chooser
    if public and not pins and budget is None:
        return ""
    plain = [[target, name, None if config is None else dict(config)] for target, name, config in pins]
    return json.dumps({"pins": plain, "budget": budget, "registry": 0 if public else id(chooser)}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _parse_terms(text: str) -> tuple[tuple[Any, ...], int | None, int]:
    terms = json.loads(text) if text else {"pins": [], "budget": None, "registry": 0}
    pins = tuple((target, name, None if config is None else Config(config)) for target, name, config in terms["pins"])
    return pins, terms["budget"], terms["registry"]


class LibraryFace:
    """Calls an operation through its library operators; written for Dynamo, which traces it.

    Args:
        face: what ``describe_face`` gives, plain constants that a graph may hold.
    """

    def __init__(self, face: Face) -> None:
        self.name, self.names, self.defaults, self.outputs, self.terms = face

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The op's outputs; no signature objects and no validation here: the operator validates when it runs."""
        for name in kwargs:
            if name not in self.names:
                raise TypeError(f"{self.name} has no argument {name!r}; it takes {self.names}")
            if name in self.names[: len(args)]:
                raise TypeError(f"{self.name} got two values for {name!r}")
        values = list(args)
        for position in range(len(values), len(self.names)):
            values.append(kwargs.get(self.names[position], self.defaults[position]))
        results = getattr(torch.ops.liger_registry, self.name)(*values, self.terms)
        return results[0] if self.outputs == 1 else results[: self.outputs]

    def call(self, tensors: Tensors, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """The op's outputs for bound and validated arguments."""
        return self(*tensors, *options.values())


def describe_face(op: Op, terms: str) -> Face:
    """The library face of an operation; defines its operators if they are not."""
    if op.name not in _defined:
        with _defining:  # an operator can be defined once; several threads may come with the first call
            if op.name not in _defined:
                _defined[op.name] = LibraryOperators(op)
    parameters = op.signature.parameters
    defaults = tuple(None if p.default is inspect.Parameter.empty else p.default for p in parameters.values())
    return f"{op.name}_{FORWARD}", tuple(parameters), defaults, len(op.outputs), terms


class LibraryOperators:
    """The library operators of one operation, defined when its first handle is made."""

    def __init__(self, op: Op) -> None:
        self.op, self.scheme = op, op.schemes[0]
        self.library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._define()

    def _define(self) -> None:
        op, scheme = self.op, self.scheme
        tensors = ", ".join(f"Tensor{'?' if i.optional else ''} {i.name}" for i in op.inputs)
        options = "".join(f", {_KINDS[o.kind]} {o.name}" for o in op.options)
        results = ", ".join(["Tensor"] * (len(op.outputs) + len(scheme.saved)))
        optional = {i.name: "?" if i.optional else "" for i in op.inputs}
        held = "".join(f", Tensor{optional[n]} {n}" for n in scheme.saved_inputs) + "".join(
            f", Tensor {n}" for n in scheme.saved
        )
        grads = ", ".join(f"Tensor grad_{n}" for n in op.outputs)
        forward, backward = f"{op.name}_{FORWARD}", f"{op.name}_{BACKWARD}"
        self.library.define(f"{forward}({tensors}{options}, str terms) -> ({results})")  # type: ignore[no-untyped-call]
        self.library.define(f"{backward}({grads}{held}, bool[] needs{options}, str terms) -> Tensor[]")  # type: ignore[no-untyped-call]
        self.library.impl(forward, self._forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        self.library.impl(backward, self._backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        names = f"{NAMESPACE}::{forward}", f"{NAMESPACE}::{backward}"
        torch.library.register_fake(names[0], self._fake_forward, lib=self.library)
        torch.library.register_fake(names[1], self._fake_backward, lib=self.library)
        torch.library.register_autograd(names[0], self._gradients, setup_context=self._setup, lib=self.library)
        torch.library.register_autograd(names[1], _refuse, lib=self.library)
        self.backward_operator = getattr(getattr(torch.ops, NAMESPACE), backward).default

    def _choose(
        self, phase: str, tensors: Tensors, options: dict[str, Any], needs: tuple[bool, ...], terms: str
    ) -> Callable[..., tuple[Any, ...]]:
        pins, budget, registry = _parse_terms(terms)
        chooser = _choosers.get(registry)
        if chooser is None:
            raise RuntimeError(f"the registry that {self.op.name} was traced with is gone")
        bound: Callable[..., tuple[Any, ...]] = chooser.bound(self.op, phase, tensors, options, needs, pins, budget)
        return bound

    def _options(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return {o.name: o.validate(self.op.name, v) for o, v in zip(self.op.options, values, strict=True)}

    def _forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        count = len(self.op.inputs)
        tensors, options = args[:count], self._options(args[count:-1])
        launch = self._choose(FORWARD, tensors, options, (), args[-1])
        try:
            results = launch(*tensors)
        except NotLoaded:
            results = self.scheme.reference(*tensors, **options)
        return tuple(_as(r, e) for r, e in zip(results, self._fake_forward(*_on_meta(args)), strict=True))

    def _fake_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        count = len(self.op.inputs)
        options = self._options(args[count:-1])
        self.op.validate(args[:count], options)
        return self.scheme.allocate(*args[:count], **options)

    def _split(self, args: tuple[Any, ...]) -> tuple[Tensors, Tensors, tuple[bool, ...], dict[str, Any]]:
        """The tensors, the op's inputs among them, needs and options of a call of the backward operator."""
        op, scheme = self.op, self.scheme
        count = len(op.outputs) + len(scheme.saved_inputs) + len(scheme.saved)
        held = dict(zip(scheme.saved_inputs, args[len(op.outputs) :], strict=False))
        return (
            args[:count],
            tuple(held[i.name] for i in op.inputs),
            tuple(args[count]),
            self._options(args[count + 1 : -1]),
        )

    def _backward(self, *args: Any) -> list[torch.Tensor]:
        tensors, inputs, needs, options = self._split(args)
        launch = self._choose(BACKWARD, inputs, options, needs, args[-1])
        try:
            results = launch(*tensors)
        except NotLoaded:
            results = self._plain_backward(inputs, options, needs)(*tensors)
        found = [g for g in results if g is not None]
        return [_as(g, e) for g, e in zip(found, self._fake_backward(*_on_meta(args)), strict=True)]

    def _plain_backward(
        self, inputs: Tensors, options: dict[str, Any], needs: tuple[bool, ...]
    ) -> Callable[..., tuple[Any, ...]]:
        problem = self.op.problem(self.op.describe(inputs, options), BACKWARD, self.scheme.name, needs)
        device = Device.of(next(t for t in inputs if t is not None).device)
        return reference_implementation(self.op, problem).bind(Config(), device, options, needs)

    def _fake_backward(self, *args: Any) -> list[torch.Tensor]:
        _, inputs, needs, _ = self._split(args)
        named = {i.name: t for i, t in zip(self.op.inputs, inputs, strict=True)}
        wanted = [named[n] for n, need in zip(self.op.differentiable, needs, strict=True) if need]
        return [_like(t) for t in wanted if t is not None]

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401
        names = [i.name for i in self.op.inputs]
        held = [inputs[names.index(name)] for name in self.scheme.saved_inputs]
        ctx.save_for_backward(*held, *output[len(self.op.outputs) :])
        ctx.options = inputs[len(names) :]
        ctx.set_materialize_grads(True)

    def _gradients(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:  # noqa: ANN401
        op = self.op
        wanted = dict(zip([i.name for i in op.inputs], ctx.needs_input_grad, strict=False))
        needs = [bool(wanted[name]) for name in op.differentiable]
        found = iter(self.backward_operator(*grads[: len(op.outputs)], *ctx.saved_tensors, needs, *ctx.options))
        by_name = {name: next(found) for name, need in zip(op.differentiable, needs, strict=True) if need}
        return (*[by_name.get(i.name) for i in op.inputs], *[None] * (len(op.options) + 1))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty gradient of a tensor's shape, dtype and device, with its strides where its rows are contiguous."""
    keep = tensor.dim() > 0 and tensor.stride(-1) == 1
    return torch.empty_like(tensor, memory_format=torch.preserve_format if keep else torch.contiguous_format)


def _on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors that have no memory, to ask for a layout without allocating it."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a
        for a in args
    )


def _as(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The result in the layout that tracing promised; a copy only where an implementation chose another."""
    if result.stride() == expected.stride():
        return result
    return torch.empty_strided(expected.shape, expected.stride(), dtype=result.dtype, device=result.device).copy_(
        result
    )


def _refuse(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
    raise transform_error("double backward")


def transform_error(what: str) -> UnsupportedTransformError:
    """The error for a transform that a fused operation does not support."""
    return UnsupportedTransformError(
        f"fused operations do not support {what}",
        why="their backward is a kernel of its own, which no rule differentiates or batches",
        fix="use the operation's plain PyTorch reference there: registry.op(name).reference",
    )
