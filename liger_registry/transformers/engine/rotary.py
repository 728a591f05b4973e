"""Finding rotary embeddings: modules whose methods call a function that ``rope`` computes.

Such a function is a global of the modeling file, shared by every model of that kind, and stays what it is. The method
that calls it is built again for the class, with ``rope`` under the function's name, and bound to the instance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.reaching import reaches, signal
from liger_registry.transformers.engine.rebuild import CannotRebuild, Shared, chain, global_names, rebuild
from liger_registry.transformers.engine.rebuilt import Rebuilt, rebound, rebuilt_of
from liger_registry.transformers.engine.report import Row
from liger_registry.transformers.engine.rotations import NotRotary
from liger_registry.transformers.engine.turning import Turned, turned

OP = "rope"


@dataclass(frozen=True, slots=True)
class Use:
    """A method of a class, and the rotary functions that it calls.

    Attributes:
        method: its name.
        functions: by global name, those that ``rope`` computes.
        reasons: what was said of each other that looked like one.
    """

    method: str
    functions: dict[str, Turned]
    reasons: tuple[str, ...]


_uses: weakref.WeakKeyDictionary[type, tuple[Use, ...]] = weakref.WeakKeyDictionary()
_rebuilt: Shared[Callable[..., Any]] = Shared()


class RotaryMethod(Rebuilt):
    """A method that calls ``rope`` for a module."""

    def _find(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(type(self.module), self.attribute)
        for use in uses(type(self.module)):
            if use.method == self.attribute and use.functions:
                return _with(function, use)
        return function


def find(model: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    """The rotary embeddings of a model."""
    if not enabled.get(OP, True):
        return
    failed: dict[tuple[type, str], str] = {}
    for path, module in model.named_modules():
        for use in uses(type(module)):
            found = _look(path, module, use, failed)
            if found is not None:
                yield found


def _look(path: str, module: nn.Module, use: Use, failed: dict[tuple[type, str], str]) -> Binding | Row | None:
    kind = type(module).__name__
    if not use.functions:
        return Row(OP, path, False, "; ".join(use.reasons), kind)
    if _has_it(module, use.method):
        return None
    names = " and ".join(use.functions)
    key = type(module), use.method
    what = failed[key] if key in failed else unreached(module, use)
    if what is None:
        return None  # a layer that turns nothing, in a class of those that do
    if what:
        failed[key] = what  # what could not be tried on one layer is not tried on sixty
        return Row(OP, path, False, f"{names} of {use.method}: {what}", kind)
    how = ", ".join(dict.fromkeys(f"{name} turns {f.rotation.name}" for name, f in use.functions.items()))
    return rebound(OP, path, RotaryMethod, module, use.method, how)


def _has_it(module: nn.Module, method: str) -> bool:
    """Whether its method was built again already, for q/k norms and the rotation together."""
    return any(rebuilt_of(module.__dict__.get(name)) is not None for name in (method, f"_old_{method}"))


def _with(function: Callable[..., Any], use: Use) -> Callable[..., Any]:
    return _rebuilt.get_or_make(function, "rope", lambda: rebuild(function, use.functions))


def unreached(module: nn.Module, use: Use) -> str | None:
    """Whether a call of the module comes to one of these functions.

    Returns:
        "" if it does, None if it ends without, else why it could not be tried.
    """
    function = getattr(type(module), use.method)
    signalling = dict.fromkeys(use.functions, signal)
    try:
        made = _rebuilt.get_or_make(function, "signal", lambda: rebuild(function, signalling))
    except CannotRebuild as error:
        return error.reason
    return reaches(module, use.method, made)


def uses(kind: type) -> tuple[Use, ...]:
    """The methods of a class that call rotary functions, its own and those it inherits."""
    found = _uses.get(kind)
    if found is None:
        found = _uses[kind] = tuple(_search(kind))
    return found


def _search(kind: type) -> Iterator[Use]:
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for method, function in list(vars(base).items()):
            if method in seen or not isinstance(function, FunctionType):
                continue
            seen.add(method)
            use = _use(method, function)
            if use is not None:
                yield use


def _use(method: str, function: FunctionType) -> Use | None:
    try:
        inner = chain(function)[-1]
    except CannotRebuild:
        return None
    functions: dict[str, Turned] = {}
    reasons = []
    for name in global_names(inner):
        value = inner.__globals__.get(name)
        plain = _plain(value)
        if plain is None or not _looks_rotary(plain):
            continue
        try:
            functions[name] = turned(plain)
        except NotRotary as error:
            reasons.append(f"{name}: {error.reason}")
    return Use(method, functions, tuple(reasons)) if functions or reasons else None


def _plain(value: object) -> FunctionType | None:
    """A function; also under the module that the package ``kernels`` makes of one, while it stands for nothing else."""
    if isinstance(value, FunctionType):
        return value
    if not isinstance(value, nn.Module) or "forward" in value.__dict__ or not hasattr(value, "kernel_layer_name"):
        return None
    forward = type(value).forward
    if not isinstance(forward, FunctionType) or forward.__code__.co_names or len(forward.__closure__ or ()) != 1:
        return None
    inner = (forward.__closure__ or ())[0].cell_contents
    return inner if isinstance(inner, FunctionType) else None


def _looks_rotary(function: FunctionType) -> bool:
    """Whether it takes tables, and something to turn by them."""
    layers = chain(function)
    code = layers[-1].__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tables = [name for name in names if name in ("cos", "sin") or name.startswith("freqs_c")]
    return len(names) > len(tables) and (set(tables) >= {"cos", "sin"} or bool(set(tables) - {"cos", "sin"}))
