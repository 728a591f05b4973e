"""What a reading handles: symbols, and objects of Python that are there while reading."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any, Union

import torch

from liger_registry.transformers.engine.expressions import Expr, const, tuple_of
from liger_registry.transformers.engine.rebuild import CannotRebuild, chain
from liger_registry.transformers.engine.vocabulary import Unreadable

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, type(...))
# Wrappers that only rename or drop keywords before they call what they wrap.
_HARMLESS = ("transformers.utils.deprecation",)


@dataclass(frozen=True)
class Known:
    """An object that is there while reading, and the module's attribute it came from."""

    value: Any
    path: str = ""


Value = Union[Expr, Known, "tuple[Any, ...]"]


def innermost(function: Any) -> FunctionType:  # noqa: ANN401
    """The function of Python under decorators that change nothing.

    Raises:
        Unreadable: a decorator of another kind, or no Python function at all.
    """
    if isinstance(function, FunctionType) and function.__name__ == "<lambda>":
        raise Unreadable("a lambda")
    try:
        layers = chain(function)
    except CannotRebuild as error:
        raise Unreadable(error.reason) from error
    for layer in layers[:-1]:
        if layer.__globals__.get("__name__") not in _HARMLESS:
            raise Unreadable(f"{layers[-1].__qualname__} is wrapped by {layer.__code__.co_name}")
    return layers[-1]


def known(value: Any, path: str = "") -> Value:  # noqa: ANN401
    """An object of Python as a value."""
    return value if isinstance(value, Expr) else Known(value, path)


def as_expr(value: Value) -> Expr:
    """A value as a node.

    Raises:
        Unreadable: an object that is none: a module, a function.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, tuple):
        return tuple_of(*map(as_expr, value))
    plain = value.value
    if isinstance(plain, (tuple, list)) and all(isinstance(v, _PLAIN) for v in plain):
        return const(tuple(plain), value.path) if value.path else tuple_of(*map(const, plain))
    if isinstance(plain, slice):
        return Expr("range", tuple(const(v) for v in (plain.start, plain.stop, plain.step)))
    if not isinstance(plain, _PLAIN):
        raise Unreadable(f"{getattr(plain, 'name', type(plain).__name__)} is used as a value")
    return const(plain, value.path)
