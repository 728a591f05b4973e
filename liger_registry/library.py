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
from liger_registry.op import Op, Scheme
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.reference import reference_implementation

NAMESPACE = "liger_registry"
_KINDS = {float: "float", int: "int", bool: "bool", str: "str"}
Tensors = tuple[torch.Tensor | None, ...]
# The operation's name; its arguments' names and defaults; for each scheme the forward operator's name, whether it takes
# needs, and the options' values with which it cannot serve; for each output the position of the option that asks for
# it, or -1; the number of inputs; the positions of those that autocast casts; and the terms.
Face = tuple[
    str,
    tuple[str, ...],
    tuple[Any, ...],
    tuple[tuple[str, bool, tuple[tuple[int, tuple[Any, ...]], ...]], ...],
    tuple[int, ...],
    int,
    tuple[int, ...],
    str,
]

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
        self.name, self.names, self.defaults, self.schemes, self.outputs, self.inputs, self.autocast, self.terms = face

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
        device_type = values[0].device.type
        if self.autocast and device_type != "meta" and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            for position in self.autocast:
                if values[position] is not None and values[position].dtype != torch.float64:
                    values[position] = values[position].to(dtype)
            with torch.autocast(device_type, enabled=False):
                return self._run(values)
        return self._run(values)

    def _run(self, values: list[Any]) -> Any:  # noqa: ANN401
        for operator, gradients, excludes in self.schemes:
            if any(values[position] in held for position, held in excludes):
                continue
            if gradients:
                enabled = torch.is_grad_enabled()
                needs = [enabled and t is not None and t.requires_grad for t in values[: self.inputs]]
                results = getattr(torch.ops.liger_registry, operator)(*values, needs, self.terms)
            else:
                results = getattr(torch.ops.liger_registry, operator)(*values, self.terms)
            if isinstance(results, torch.Tensor):  # an operator with one result returns no tuple
                return results
            wanted = [results[i] for i, asked in enumerate(self.outputs) if asked < 0 or values[asked]]
            return wanted[0] if len(wanted) == 1 else tuple(wanted)
        raise ValueError(f"no scheme of {self.name} serves these options")

    def call(self, tensors: Tensors, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """The op's outputs for bound and validated arguments."""
        return self(*tensors, *options.values())


def describe_face(op: Op, terms: str) -> Face:
    """The library face of an operation; defines its operators if they are not."""
    for scheme in op.schemes:
        name = operator_name(op, scheme, FORWARD)
        if name not in _defined:
            with _defining:  # an operator can be defined once; several threads may come with the first call
                if name not in _defined:
                    _defined[name] = LibraryOperators(op, scheme)
    parameters = op.signature.parameters
    names = tuple(parameters)
    defaults = tuple(None if p.default is inspect.Parameter.empty else p.default for p in parameters.values())
    schemes = tuple(
        (
            operator_name(op, scheme, FORWARD),
            scheme.gradients,
            tuple((names.index(option), tuple(values)) for option, values in scheme.excludes.items()),
        )
        for scheme in op.schemes
    )
    outputs = tuple(names.index(op.asked[name]) if name in op.asked else -1 for name in op.outputs)
    autocast = tuple(names.index(name) for name in op.autocast)
    return op.name, names, defaults, schemes, outputs, len(op.inputs), autocast, terms


def operator_name(op: Op, scheme: Scheme, phase: str) -> str:
    """The name of one phase's operator; that of the first scheme goes by the operation's name alone."""
    return f"{op.name}_{phase}" if scheme is op.schemes[0] else f"{op.name}_{scheme.name}_{phase}"


class LibraryOperators:
    """The library operators of one scheme of an operation, defined when its first handle is made."""

    def __init__(self, op: Op, scheme: Scheme) -> None:
        self.op, self.scheme = op, scheme
        self.library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._define()

    def _define(self) -> None:
        op, scheme = self.op, self.scheme
        tensors = ", ".join(f"Tensor{'?' if i.optional else ''} {i.name}" for i in op.inputs)
        options = "".join(f", {_KINDS[o.kind]} {o.name}" for o in op.options)
        count = len(op.outputs) + len(scheme.saved)
        results = ", ".join(["Tensor"] * count)
        grads = ", ".join(f"Tensor? grad_{n}" for n in op.outputs)
        held = "".join(f", Tensor {n}" for n in (*scheme.saved_outputs, *scheme.saved))
        forward, backward = operator_name(op, scheme, FORWARD), operator_name(op, scheme, BACKWARD)
        needs = ", bool[] needs" if scheme.gradients else ""
        self.library.define(f"{forward}({tensors}{options}{needs}, str terms) -> ({results})")  # type: ignore[no-untyped-call]
        self.library.define(  # type: ignore[no-untyped-call]
            f"{backward}({grads}, {tensors}{held}, bool[] needs{options}, str terms) -> Tensor[]"
        )
        # "-> (Tensor)" is an operator that returns no tuple.
        run, fake = (_alone(f) if count == 1 else f for f in (self._forward, self._fake_forward))
        self.library.impl(forward, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        self.library.impl(backward, self._backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        names = f"{NAMESPACE}::{forward}", f"{NAMESPACE}::{backward}"
        torch.library.register_fake(names[0], fake, lib=self.library)
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
        bound: Callable[..., tuple[Any, ...]] = chooser.bound(
            self.op, phase, self.scheme.name, tensors, options, needs, pins, budget
        )
        return bound

    def _options(self, values: tuple[Any, ...]) -> dict[str, Any]:
        options = {o.name: o.validate(self.op.name, v) for o, v in zip(self.op.options, values, strict=True)}
        return dict(self.op.compiled(options))

    def _call(self, args: tuple[Any, ...]) -> tuple[Tensors, dict[str, Any], tuple[bool, ...]]:
        """Inputs, options and needed gradients of a call of the forward operator."""
        count = len(self.op.inputs)
        values = args[count : count + len(self.op.options)]
        asked = args[-2] if self.scheme.gradients else [False] * count
        pairs = zip(self.op.inputs, asked, strict=True)
        return args[:count], self._options(values), tuple(bool(need) for i, need in pairs if i.differentiable)

    def _forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        tensors, options, needs = self._call(args)
        launch = self._choose(FORWARD, tensors, options, needs, args[-1])
        try:
            results = launch(*tensors)
        except NotLoaded:
            results = self.scheme.reference(*tensors, **options, **({"needs": needs} if self.scheme.gradients else {}))
        promised = self._fake_forward(*_on_meta(args))
        found = (_absent(tensors) if r is None else r for r in results)
        return tuple(_as(r, e) for r, e in zip(found, promised, strict=True))

    def _fake_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        tensors, options, needs = self._call(args)
        self.op.validate(tensors, options)
        results = self.scheme.allocate(*tensors, **options, **({"needs": needs} if self.scheme.gradients else {}))
        return tuple(_absent(tensors) if r is None else r for r in results)

    def _split(self, args: tuple[Any, ...]) -> tuple[Tensors, Tensors, Tensors, tuple[bool, ...], dict[str, Any]]:
        """Gradients, inputs, what forward kept, needs and options of a call of the backward operator."""
        outputs, inputs = len(self.op.outputs), len(self.op.inputs)
        kept = outputs + inputs + len(self.scheme.saved_outputs) + len(self.scheme.saved)
        held = tuple(None if t.dtype is _ABSENT else t for t in args[outputs + inputs : kept])
        return (
            args[:outputs],
            args[outputs : outputs + inputs],
            held,
            tuple(args[kept]),
            self._options(args[kept + 1 : -1]),
        )

    def _backward(self, *args: Any) -> list[torch.Tensor]:
        grads, inputs, held, needs, options = self._split(args)
        launch = self._choose(BACKWARD, inputs, options, needs, args[-1])
        there = dict(zip((i.name for i in self.op.inputs), inputs, strict=True))
        # The scheme's owned buffers are the graph's here, and may be read again: backward gets copies to write into.
        first = len(held) - len(self.scheme.owned)
        held = (*held[:first], *(None if t is None else t.clone() for t in held[first:]))
        tensors = (*grads, *(there[name] for name in self.scheme.saved_inputs), *held)
        try:
            results = launch(*tensors)
        except NotLoaded:
            results = self._plain_backward(inputs, options, needs)(*tensors)
        found = [g for g in results if g is not None]
        promised = self._fake_backward(*_on_meta(args))
        distinct = {id(g): g for g in reversed(found)}
        # An operator may not return one tensor twice.
        return [
            _as(g if distinct.pop(id(g), None) is g else g.clone(), e) for g, e in zip(found, promised, strict=True)
        ]

    def _plain_backward(
        self, inputs: Tensors, options: dict[str, Any], needs: tuple[bool, ...]
    ) -> Callable[..., tuple[Any, ...]]:
        problem = self.op.problem(self.op.describe(inputs, options), BACKWARD, self.scheme.name, needs)
        device = Device.of(next(t for t in inputs if t is not None).device)
        return reference_implementation(self.op, problem).bind(Config(), device, options, needs)

    def _fake_backward(self, *args: Any) -> list[torch.Tensor]:
        grads, inputs, _, needs, _ = self._split(args)
        named = {i.name: t for i, t in zip(self.op.inputs, inputs, strict=True)}
        found = []
        for name, need in zip(self.op.differentiable, needs, strict=True):
            tensor = named[name]
            if need and tensor is not None:
                # A stand-in has no layout; a gradient of its shape has the one that backward goes by.
                alike = None if name in self.scheme.saved_inputs else _of_shape(grads, tensor)
                found.append(_like(tensor if alike is None else alike, tensor.dtype))
        return found

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        op, scheme = self.op, self.scheme
        results = (output,) if isinstance(output, torch.Tensor) else output
        count = len(op.inputs)
        tensors = [
            t if t is None or spec.name in scheme.saved_inputs else _stand_in(t)
            for spec, t in zip(op.inputs, inputs[:count], strict=True)
        ]
        outputs = [results[op.outputs.index(name)] for name in scheme.saved_outputs]
        ctx.save_for_backward(*tensors, *outputs, *results[len(op.outputs) :])
        ctx.options = inputs[count : count + len(op.options)]
        ctx.terms = inputs[-1]
        ctx.none = len(inputs) - count
        ctx.set_materialize_grads(True)
        ctx.absent = [t.dtype is _ABSENT or name in op.constant for name, t in zip(op.outputs, results, strict=False)]

    def _gradients(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:  # noqa: ANN401
        op = self.op
        wanted = dict(zip([i.name for i in op.inputs], ctx.needs_input_grad, strict=False))
        needs = [bool(wanted[name]) for name in op.differentiable]
        given = [None if absent else g for g, absent in zip(grads, ctx.absent, strict=False)]
        found = iter(self.backward_operator(*given, *ctx.saved_tensors, needs, *ctx.options, ctx.terms))
        by_name = {name: next(found) for name, need in zip(op.differentiable, needs, strict=True) if need}
        return (*[by_name.get(i.name) for i in op.inputs], *[None] * ctx.none)


# What stands for a result that a call does not have: operators return tensors, and nothing that is saved is of this
# dtype.
_ABSENT = torch.uint8


def _absent(tensors: Tensors) -> torch.Tensor:
    return next(t for t in tensors if t is not None).new_empty(0, dtype=_ABSENT)


def _alone(function: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., torch.Tensor]:
    def call(*args: Any) -> torch.Tensor:
        return function(*args)[0]

    return call


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """One element that has a tensor's shape: backward chooses by it, and the tensor itself is not kept alive."""
    return tensor.new_empty(()).expand(tensor.shape)


def _of_shape(grads: Tensors, tensor: torch.Tensor) -> torch.Tensor | None:
    return next((g for g in grads if g is not None and g.shape == tensor.shape), None)


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty gradient of a tensor's shape and device, with its strides where its rows are contiguous."""
    keep = tensor.dim() > 0 and tensor.stride(-1) == 1
    return torch.empty_like(
        tensor, dtype=dtype, memory_format=torch.preserve_format if keep else torch.contiguous_format
    )


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
