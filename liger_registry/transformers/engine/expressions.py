"""Expressions: what tensor code computes, whatever its spelling.

An expression is a tree of ``Expr``. Equal trees have equal keys, so comparing and hashing cost nothing. The functions
here build nodes in one form: terms and factors in one order, signs outermost, ``x ** 2`` for every square. They use
identities alone that hold bit for bit in every dtype; what rounds otherwise is another expression.

=============== ======================================== ==================================================
node            args                                     value
=============== ======================================== ==================================================
``param``                                                the parameter's name
``const``                                                a number, dtype, string, None ... (``path``: where from)
``attr``                                                 path of a parameter or buffer of the module
``flag``                                                 path of a bool that changes in use: ``training``
``call``        what a submodule is called with          the submodule's path
``kw``          one keyword argument                     its name
``add mul``     two, in canonical order
``div neg pow``
``matmul``      two
``cast``        x, dtype                                 (dtype: a ``const``, or ``dtype`` of a tensor)
``dtype``       x
``slice``       x, start, stop, step (last dimension)
``select``      x, index (last dimension)
``index``       x, items
``size``        x, dimension
``shape``       x
``tuple``       any
``item``        what gives several, number
``if``          condition, then, else
``eq in is``    two; ``not``, ``and``, ``or``
any other       the arguments of the torch function of that name, as ``vocabulary`` orders them
=============== ======================================== ==================================================
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterator
from typing import Any

_LONGEST_KEY = 160


class Expr:
    """A node; see the module's table.

    Args:
        op: what it is.
        args: the nodes it is of.
        value: what else tells it from others of this kind.
        path: of a constant read from the module: the attribute it came from. Not part of what it is.
    """

    __slots__ = ("args", "key", "op", "path", "value")
    key: str

    def __init__(self, op: str, args: tuple[Expr, ...] = (), value: Any = None, path: str = "") -> None:  # noqa: ANN401
        self.op, self.args, self.value, self.path = op, args, value, path
        key = f"{op}[{_text(value)}]({','.join(arg.key for arg in args)})"
        self.key = key if len(key) <= _LONGEST_KEY else hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return show(self)

    def walk(self) -> Iterator[Expr]:
        """The node and everything below it; what occurs several times comes several times."""
        yield self
        for arg in self.args:
            yield from arg.walk()

    def replace(self, old: Expr, new: Expr) -> Expr:
        """The same with one expression in place of another."""
        if self == old:
            return new
        if not self.args:
            return self
        return rebuilt(self, tuple(arg.replace(old, new) for arg in self.args))


def _text(value: object) -> str:
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        return repr(float(value)) if isinstance(value, (int, float)) else repr(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_text, value))})"
    return repr(value)


def const(value: Any, path: str = "") -> Expr:  # noqa: ANN401
    """A constant."""
    return Expr("const", (), value, path)


NONE = const(None)


def number(expr: Expr) -> float | None:
    """The number a constant is; None for anything else, True and False too."""
    value = expr.value
    if expr.op != "const" or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value


def rebuilt(expr: Expr, args: tuple[Expr, ...]) -> Expr:
    """A node of the same kind over other arguments, in canonical form."""
    build = _BUILDERS.get(expr.op)
    if build is not None:
        made: Expr = build(*args)
        return made
    return Expr(expr.op, args, expr.value, expr.path)


def _ordered(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return (a, b) if a.key <= b.key else (b, a)


def add(a: Expr, b: Expr) -> Expr:
    """``a + b``."""
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return const(x + y)
    if a.op == "neg" and b.op == "neg":
        return neg(add(a.args[0], b.args[0]))
    return Expr("add", _ordered(a, b))


def sub(a: Expr, b: Expr) -> Expr:
    """``a - b``, which is ``a + (-b)`` bit for bit."""
    return add(a, neg(b))


def neg(a: Expr) -> Expr:
    """``-a``."""
    x = number(a)
    if x is not None:
        return const(-x)
    return a.args[0] if a.op == "neg" else Expr("neg", (a,))


def mul(a: Expr, b: Expr) -> Expr:
    """``a * b``; of equal factors the square."""
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return const(x * y)
    if a.op == "neg":
        return neg(mul(a.args[0], b))
    if b.op == "neg":
        return neg(mul(a, b.args[0]))
    return Expr("pow", (a, const(2))) if a == b else Expr("mul", _ordered(a, b))


def div(a: Expr, b: Expr) -> Expr:
    """``a / b``."""
    x, y = number(a), number(b)
    if x is not None and y:
        return const(x / y)
    if a.op == "neg":
        return neg(div(a.args[0], b))
    return Expr("div", (a, b))


def power(a: Expr, b: Expr) -> Expr:
    """``a ** b``."""
    x, y = number(a), number(b)
    if x is not None and y is not None and (x > 0 or float(y).is_integer()):
        return const(x**y)
    if y == 1:
        return a
    if y == 2 and a.op == "neg":
        a = a.args[0]
    return Expr("pow", (a, b))


def floordiv(a: Expr, b: Expr) -> Expr:
    """``a // b``."""
    x, y = number(a), number(b)
    return const(x // y) if x is not None and y else Expr("floordiv", (a, b))


def dtype_of(a: Expr) -> Expr:
    """``a.dtype``."""
    return a.args[1] if a.op == "cast" else Expr("dtype", (a,))


def cast(a: Expr, dtype: Expr) -> Expr:
    """``a.to(dtype)``."""
    return a if dtype_of(a) == dtype else Expr("cast", (a, dtype))


def piece(a: Expr, start: Expr, stop: Expr, step: Expr) -> Expr:
    """``a[..., start:stop:step]``."""
    start = const(0) if start == NONE else start
    step = const(1) if step == NONE else step
    if stop == Expr("size", (a, const(-1))):
        stop = NONE
    if number(start) == 0 and stop == NONE and number(step) == 1:
        return a
    return Expr("slice", (a, start, stop, step))


def half(a: Expr, which: int) -> Expr:
    """The first or second half of the last dimension, whose size is taken to be even."""
    middle = floordiv(Expr("size", (a, const(-1))), const(2))
    return piece(a, const(0), middle, NONE) if which == 0 else piece(a, middle, NONE, NONE)


def choose(condition: Expr, then: Expr, otherwise: Expr) -> Expr:
    """``then if condition else otherwise``."""
    if then == otherwise:
        return then
    if condition.op == "not":
        return choose(condition.args[0], otherwise, then)
    if condition.op == "const":
        return then if condition.value else otherwise
    return Expr("if", (condition, then, otherwise))


def negate(a: Expr) -> Expr:
    """``not a``."""
    if a.op == "const":
        return const(not a.value)
    return a.args[0] if a.op == "not" else Expr("not", (a,))


def tuple_of(*items: Expr) -> Expr:
    """Several values."""
    return Expr("tuple", items)


_BUILDERS: dict[str, Any] = {
    "add": add,
    "mul": mul,
    "div": div,
    "neg": neg,
    "pow": power,
    "floordiv": floordiv,
    "dtype": dtype_of,
    "cast": cast,
    "slice": piece,
    "if": choose,
    "not": negate,
}
_SIGNS = {"add": " + ", "mul": " * ", "div": " / ", "pow": " ** ", "floordiv": " // ", "matmul": " @ "}


def brief(expr: Expr, limit: int = 160) -> str:
    """An expression as text of so many characters at most."""
    text = str(expr)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def show(expr: Expr) -> str:
    """An expression as text for people, close to Python."""
    args = [show(arg) for arg in expr.args]
    if expr.op == "const":
        value = (expr.path and f"self.{expr.path}") or repr(expr.value)
        return value.removeprefix("torch.")
    if expr.op == "param":
        return str(expr.value)
    if expr.op in ("attr", "flag"):
        return f"self.{expr.value}"
    if expr.op == "call":
        return f"self.{expr.value}({', '.join(args)})"
    if expr.op == "kw":
        return f"{expr.value}={args[0]}"
    if expr.op in _SIGNS:
        return f"({_SIGNS[expr.op].join(args)})"
    if expr.op == "neg":
        return f"-{args[0]}"
    if expr.op == "slice":
        step = "" if args[3] == "1" else f":{args[3]}"
        ends = [end if end not in ("0", "None") else "" for end in args[1:3]]
        return f"{args[0]}[..., {ends[0]}:{ends[1]}{step}]"
    if expr.op == "if":
        return f"({args[1]} if {args[0]} else {args[2]})"
    if expr.op == "tuple":
        return f"({', '.join(args)})"
    return f"{expr.op}({', '.join(args)})"
