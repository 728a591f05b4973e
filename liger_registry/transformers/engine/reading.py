"""Reading code: what a ``forward``, or a plain function, computes, as an expression whatever its spelling.

    reading = read_method(norm)                      # of the class's own forward, on this instance
    reading.result                                   # Expr; prints like Python
    reading.parameters                               # ("hidden_states",): the symbols it depends on
    read_function(apply_rotary_pos_emb).result       # tuple(add(mul(q, unsqueeze(cos, 1)), ...), ...)

Both raise ``Unreadable`` (with a short ``reason`` for the report) on whatever they do not understand. Parameters with a
default have that value unless ``symbols`` names them; ``constants`` gives others values of their own. ``self.x`` is a
constant that knows its path (numbers, bools, None, strings, dtypes), ``attr`` (parameters and buffers) or, called, a
``call`` of the submodule. Helper methods and functions are read in. What nodes there are, and which spellings become
one, is told in ``expressions`` and ``vocabulary``; roundings are part of an expression: ``rounding`` says what it comes
to for tensors of given dtypes, and ``matching`` compares it with a formula that has holes.

A branch on what is not known before the call is an ``if`` node. ``guards`` are conditions under which the code raises,
``assumes`` what was taken for granted ("autocast is off"): who replaces the code calls the original in these cases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from liger_registry.transformers.engine.calling import summary
from liger_registry.transformers.engine.expressions import Expr
from liger_registry.transformers.engine.interpreting import Interpreter
from liger_registry.transformers.engine.values import Known, Value, as_expr, innermost
from liger_registry.transformers.engine.vocabulary import Unreadable

__all__ = ["Reading", "Unreadable", "read_function", "read_method"]


@dataclass(frozen=True)
class Reading:
    """What code computes.

    Attributes:
        parameters: names of the symbols, in order.
        result: what is returned; several values are one ``tuple`` node.
        guards: conditions under which it raises.
        assumes: what was taken for granted.
        read: what was read from the module, by path: the reading holds for every instance where it is the same.
    """

    parameters: tuple[str, ...]
    result: Expr
    guards: tuple[Expr, ...] = ()
    assumes: frozenset[str] = frozenset()
    read: tuple[tuple[str, object], ...] = ()


_Outcome = Reading | Unreadable
_methods: weakref.WeakKeyDictionary[type, dict[object, list[tuple[tuple[tuple[str, object], ...], _Outcome]]]] = (
    weakref.WeakKeyDictionary()
)


def read_method(module: nn.Module, name: str = "forward", symbols: Collection[str] = ()) -> Reading:
    """What a method of a module's class returns on this instance; cached for instances that are alike.

    Args:
        module: the instance; it is only looked at.
        name: the method. One that the instance itself has (a wrapper bound to it) is not looked at.
        symbols: parameters with a default that are to stay symbols.

    Raises:
        Unreadable: it is not understood.
    """
    function = getattr(type(module), name, None)
    own = weakref.ref(function) if isinstance(function, FunctionType) else function  # it may know its class
    known = _methods.setdefault(type(module), {}).setdefault((name, own, frozenset(symbols)), [])
    for read, outcome in known:
        if all(_same(module, path, value) for path, value in read):
            if isinstance(outcome, Unreadable):
                raise Unreadable(outcome.reason)
            return outcome
    interpreter = Interpreter(module)
    done: _Outcome | None = None
    try:
        if not callable(function):
            raise Unreadable(f"{type(module).__name__} has no {name}")
        done = _read(interpreter, function, Known(module), {}, symbols)
        return done
    except Unreadable as error:
        done = Unreadable(error.reason)
        raise
    finally:
        if done is not None:
            known.append((tuple(interpreter.read.items()), done))


def read_function(
    function: Callable[..., Any], constants: Mapping[str, object] | None = None, symbols: Collection[str] = ()
) -> Reading:
    """What a function returns, in terms of its parameters.

    Args:
        function: of Python, decorated or not.
        constants: values of parameters.
        symbols: parameters with a default that are to stay symbols.

    Raises:
        Unreadable: it is not understood.
    """
    return _read(Interpreter(), function, None, constants or {}, symbols)


def _read(
    interpreter: Interpreter,
    function: Any,  # noqa: ANN401
    owner: Known | None,
    constants: Mapping[str, object],
    symbols: Collection[str],
) -> Reading:
    inner = innermost(function)
    names = _parameters(inner)[owner is not None :]
    defaults = _with_default(inner)
    arguments: dict[str, Value] = {name: Known(value) for name, value in constants.items()}
    free = tuple(n for n in names if n not in constants and (n not in defaults or n in symbols))
    arguments.update((name, Expr("param", (), name)) for name in free)
    result = interpreter.run(inner, [] if owner is None else [owner], arguments)
    return Reading(
        free,
        as_expr(result),
        tuple(interpreter.guards),
        frozenset(interpreter.assumes),
        tuple(interpreter.read.items()),
    )


def _parameters(function: FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _with_default(function: FunctionType) -> set[str]:
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    count = len(function.__defaults__ or ())
    return {*positional[len(positional) - count :], *(function.__kwdefaults__ or {})}


def _same(module: nn.Module, path: str, value: object) -> bool:
    """Whether a module has at a path what another one was read to have."""
    found: Any = module
    for name in path.split("."):
        if isinstance(found, nn.ModuleList) and name.isdigit():
            found = found[int(name)]
        elif not hasattr(found, name):
            return value == "absent"
        else:
            found = getattr(found, name)
    if isinstance(value, tuple) and value[:1] == ("tensor",):
        return hasattr(found, "dim") and not isinstance(found, nn.Module) and found.dim() == value[1]
    if isinstance(found, nn.Module):
        return type(found) is value
    if isinstance(found, MethodType):
        found = found.__func__
    return type(value) is type(summary(found)) and value == summary(found)
