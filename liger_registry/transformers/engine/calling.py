"""Attributes, subscripts and calls evaluated on symbols: what ``interpreting`` meets of torch and of modules."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from liger_registry.transformers.engine.evaluating import Evaluator, Frame
from liger_registry.transformers.engine.expressions import NONE, Expr, const, dtype_of, piece
from liger_registry.transformers.engine.values import Known, Value, as_expr, known
from liger_registry.transformers.engine.vocabulary import COMPUTED, Unreadable, apply, function_name, item

# Known tensor attributes that are no methods.
_PROPERTIES = ("device", "is_cuda", "layout", "requires_grad", "itemsize", "T", "mT")
_VARIADIC = {"view": "reshape", "reshape": "reshape", "permute": "permute", "expand": "expand", "repeat": "repeat"}


@dataclass(frozen=True)
class _TensorMethod:
    tensor: Expr
    name: str


@dataclass(frozen=True)
class _Bound:
    function: Any
    owner: Known


class Caller(Evaluator):
    """Attributes, subscripts and calls."""

    # -- attributes --------------------------------------------------------------------------------------------------

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Value:
        base, name = self.value(node.value, frame), node.attr
        if isinstance(base, Expr):
            if name == "dtype":
                return dtype_of(base)
            if name == "shape":
                return Expr("shape", (base,))
            if name == "ndim":
                return Expr("dim", (base,))
            if name == "data":
                raise Unreadable("it takes the data of a tensor out of its graph")
            if name in _PROPERTIES or base.op == "getattr":
                return Expr("getattr", (base,), name)
            return Known(_TensorMethod(base, name))
        if not isinstance(base, Known):
            raise Unreadable(f"{ast.unparse(node)!r} of a tuple")
        if isinstance(base.value, nn.Module):
            return self.module_attribute(base, name)
        if base.value is None:
            raise Unreadable(f"it needs {ast.unparse(node.value)}, which is None unless it is given")
        try:
            value = getattr(base.value, name)
        except Exception as error:
            raise Unreadable(f"{ast.unparse(node)} is not there") from error
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module) and isinstance(base.value, super):
            return Known(_Bound(value.__func__, frame.owner if isinstance(frame.owner, Known) else base))
        if not base.path:
            return known(value)
        return self._noted(value, f"{base.path}.{name}")

    def module_attribute(self, base: Known, name: str) -> Value:
        """An attribute of a module, which is noted as read if the module is a part of the one that is read."""
        module = base.value
        path = self._path(base, name)
        for registered in (module._parameters, module._buffers, module._modules):
            if name in registered:
                return self._noted(registered[name], path)
        if name == "training":
            return Expr("flag", (), path or name)
        try:
            static = inspect.getattr_static(module, name)
        except AttributeError as error:
            raise Unreadable(f"{type(module).__name__} has no {name}") from error
        if isinstance(static, property):
            return self.run(static.fget, [base], {})
        if isinstance(static, functools.cached_property):  # whose value a lookup would leave in the module
            return self.run(static.func, [base], {})
        if isinstance(static, FunctionType) and name not in module.__dict__:
            if path:
                self.read[path] = summary(static)
            return Known(_Bound(static, base))
        return self._noted(getattr(module, name), path)

    def _path(self, base: Known, name: str) -> str:
        if base.value is self.root:
            return name
        return f"{base.path}.{name}" if base.path else ""

    def _noted(self, value: Any, path: str) -> Value:  # noqa: ANN401
        if isinstance(value, torch.Tensor):
            if not path:
                raise Unreadable("a tensor that belongs to no part of the module")
            self.read[path] = ("tensor", value.dim())
            return Expr("attr", (), path)
        if path:
            self.read[path] = type(value) if isinstance(value, nn.Module) else summary(value)
        return Known(value, path)

    # -- subscripts --------------------------------------------------------------------------------------------------

    def _slice(self, node: ast.Slice, frame: Frame) -> Value:
        ends = [Known(None) if end is None else self.value(end, frame) for end in (node.lower, node.upper, node.step)]
        if all(isinstance(end, Known) for end in ends):
            return Known(slice(*(end.value for end in ends)))  # type: ignore[union-attr]
        return Expr("range", tuple(map(as_expr, ends)))

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        base, index = self.value(node.value, frame), self.value(node.slice, frame)
        if isinstance(base, Expr):
            return self._of_tensor(base, index)
        if not isinstance(index, Known):
            raise Unreadable(f"{ast.unparse(node)!r} depends on what is not known")
        try:
            if isinstance(base, tuple):
                part: Value = base[index.value]
                return part
            value = base.value[index.value]
        except Exception as error:
            raise Unreadable(f"{ast.unparse(node)} is not there") from error
        if isinstance(base.value, nn.ModuleList) and isinstance(index.value, int):
            return self._noted(value, self._path(base, str(index.value)))
        return known(value)

    def _of_tensor(self, base: Expr, index: Value) -> Value:
        if base.op in ("shape", "tuple") and isinstance(index, Known):
            if isinstance(index.value, slice):
                if base.op == "tuple":
                    return base.args[index.value]
                return Expr("sizes", (base.args[0], const(index.value.start), const(index.value.stop)))
            return item(base, int(index.value))
        items = list(index) if isinstance(index, tuple) else [index]
        if isinstance(index, Known) and isinstance(index.value, int) and not isinstance(index.value, bool):
            return item(base, index.value)
        if len(items) == 2 and items[0] == Known(...):
            last = as_expr(items[1])
            if last.op == "range":
                return piece(base, *last.args)
            return apply("unsqueeze", (base, const(-1)), {}) if last == NONE else Expr("select", (base, last))
        return Expr("index", (base, *map(as_expr, items)))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, frame: Frame) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return Known(self._super(frame))
        function = self.value(node.func, frame)
        args: list[Value] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args += self.several(self.value(arg.value, frame))
            else:
                args.append(self.value(arg, frame))
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, Known) and isinstance(value.value, dict):
                kwargs.update((str(name), known(v)) for name, v in value.value.items())
            else:
                kwargs["**"] = value
        if not isinstance(function, Known):
            raise Unreadable(f"{ast.unparse(node.func)!r} is called")
        return self.call(function, args, kwargs)

    def _super(self, frame: Frame) -> Any:  # noqa: ANN401
        closed = dict(zip(frame.function.__code__.co_freevars, frame.function.__closure__ or (), strict=False))
        if "__class__" not in closed or not isinstance(frame.owner, Known):
            raise Unreadable("super() of what is no method")
        return super(closed["__class__"].cell_contents, frame.owner.value)

    def call(self, function: Known, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What a call of a known object gives."""
        target = function.value
        if isinstance(target, functools.partial):
            bound = {name: known(value) for name, value in target.keywords.items()}
            return self.call(Known(target.func), [*map(known, target.args), *args], {**bound, **kwargs})
        if isinstance(target, _TensorMethod):
            return self._method(target, args, kwargs)
        if isinstance(target, _Bound):
            return self.run(target.function, [target.owner, *args], kwargs)
        if isinstance(target, nn.Module):
            return self._module_call(function, args, kwargs)
        if target in (torch.is_autocast_enabled, torch.is_autocast_cpu_enabled):
            self.assumes.add("autocast is off")
            return Known(False)
        name = function_name(target)
        if name is not None:
            return apply(name, *_nodes(args, kwargs))
        try:
            computed = target in COMPUTED
        except TypeError:
            computed = False
        if computed:
            return self._computed(target, args, kwargs)
        return self._other_call(target, args, kwargs)

    def _other_call(self, target: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:  # noqa: ANN401
        home = getattr(target, "__module__", None) or ""
        name = getattr(target, "__name__", type(target).__name__)
        if isinstance(target, FunctionType) and (not home.startswith("torch.") or home.startswith("torch.nn.modules")):
            return self.run(target, args, kwargs)
        if callable(target) and not isinstance(target, (type, MethodType)) and _of_torch(target, home):
            return apply(name, *_nodes(args, kwargs))
        raise Unreadable(f"it calls {name}")

    def _module_call(self, function: Known, args: list[Value], kwargs: dict[str, Value]) -> Value:
        module = function.value
        if module is self.root:
            raise Unreadable("it calls itself")
        if function.path:
            positional, named = _nodes(args, kwargs)
            nodes = (*positional, *(Expr("kw", (value,), name) for name, value in sorted(named.items())))
            return Expr("call", nodes, function.path)
        if any(True for _ in module.parameters()) or any(True for _ in module.children()):
            raise Unreadable(f"it calls a {type(module).__name__} that is no part of it")
        return self.run(type(module).forward, [function, *args], kwargs)

    def _method(self, method: _TensorMethod, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if method.name in _VARIADIC:
            if len(args) == 1 and (isinstance(args[0], tuple) or _known_sizes(args[0])):
                args = self.several(args[0])
            return Expr(_VARIADIC[method.name], (method.tensor, *map(as_expr, args)))
        positional, named = _nodes(args, kwargs)
        if method.name in ("size", "unbind", "split", "chunk") or not method.name.startswith("__"):
            return apply(method.name, (method.tensor, *positional), named)
        raise Unreadable(f"it calls {method.name}")

    def _computed(self, target: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]) -> Value:
        if target in (getattr, hasattr) and isinstance(args[0], Known) and isinstance(args[0].value, nn.Module):
            return self._getattr(target, args)
        if kwargs or any(isinstance(arg, Expr) for arg in args):
            nodes = _nodes(args, kwargs)
            return Expr(getattr(target, "__name__", "?"), (*nodes[0], *nodes[1].values()))
        if target is len and isinstance(args[0], tuple):
            return Known(len(args[0]))
        if target in (tuple, list, reversed):
            return tuple(reversed(self.several(args[0])) if target is reversed else self.several(args[0]))
        if target is enumerate and len(args) == 1:
            return tuple((Known(n), value) for n, value in enumerate(self.several(args[0])))
        if target is zip:
            return tuple(zip(*map(self.several, args), strict=False))
        if any(isinstance(arg, tuple) for arg in args):
            raise Unreadable(f"{target.__name__} of several values")
        try:
            return known(target(*(arg.value for arg in args if isinstance(arg, Known))))
        except Exception as error:
            raise Unreadable(f"{target.__name__} fails: {error}") from error

    def _getattr(self, target: Callable[..., Any], args: list[Value]) -> Value:
        base, name = args[0], args[1]
        assert isinstance(base, Known)
        if not isinstance(name, Known):
            raise Unreadable("an attribute whose name is not known")
        try:
            value = self.module_attribute(base, name.value)
        except Unreadable:
            if hasattr(base.value, name.value):
                raise
            self.read[self._path(base, name.value)] = "absent"
            if target is hasattr:
                return Known(False)
            if len(args) < 3:
                raise
            return args[2]
        return Known(True) if target is hasattr else value

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Value:
        if len(node.generators) != 1:
            raise Unreadable("a comprehension over several sequences")
        (generator,) = node.generators
        found: list[Value] = []
        for element in self.several(self.value(generator.iter, frame)):
            if isinstance(element, Expr) and element.op == "star":
                raise Unreadable("a comprehension over what is not known")
            own = Frame(frame.function, dict(frame.names), frame.owner)
            self.assign(generator.target, element, own)
            conditions = [self.truth(self.value(test, own)) for test in generator.ifs]
            if any(isinstance(condition, Expr) for condition in conditions):
                raise Unreadable("a comprehension with a condition that is not known")
            if all(conditions):
                found.append(self.value(node.elt, own))
        return tuple(found)

    _generatorexp = _listcomp

    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Bind a target, which may be several names."""
        raise NotImplementedError


def summary(value: Any) -> object:  # noqa: ANN401
    """What tells a constant from another of the same path."""
    if isinstance(value, (list, tuple)):
        return tuple(map(summary, value))
    if isinstance(value, functools.partial):
        return value.func, value.args, tuple(value.keywords.items())
    try:
        hash(value)
    except TypeError:
        return type(value)
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) or callable(value):
        return type(value), value
    return type(value)


def _known_sizes(value: Value) -> bool:
    return (isinstance(value, Known) and isinstance(value.value, (tuple, list, torch.Size))) or (
        isinstance(value, Expr) and value.op in ("shape", "sizes", "tuple")
    )


def _of_torch(target: Any, home: str) -> bool:  # noqa: ANN401
    owner = getattr(target, "__self__", None)
    return home == "torch" or home.startswith("torch.") or getattr(owner, "__name__", "").startswith("torch")


def _nodes(args: list[Value], kwargs: dict[str, Value]) -> tuple[tuple[Expr, ...], dict[str, Expr]]:
    return tuple(map(as_expr, args)), {name: as_expr(value) for name, value in kwargs.items()}
