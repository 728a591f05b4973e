"""The functions and methods of torch that a reading knows, and the one form of their arguments.

``x.mean(-1, keepdim=True)`` and ``torch.mean(x, dim=-1, keepdim=True)`` become the same node. What is not listed is a
node of its own name with its arguments as given: it equals nothing but itself, so nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from liger_registry.transformers.engine.expressions import (
    NONE,
    Expr,
    add,
    cast,
    const,
    div,
    dtype_of,
    half,
    mul,
    neg,
    number,
    piece,
    power,
    sub,
    tuple_of,
)


class Unreadable(Exception):
    """Code that cannot be read; ``reason`` says why in a few words, for the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Args = tuple[Expr, ...]
Kwargs = dict[str, Expr]

_REQUIRED = object()
# Parameters in order; "name=default" where there is one. Other names of a parameter are in _ALIASES.
_SIGNATURES = {
    **dict.fromkeys(
        ["rsqrt", "sqrt", "sigmoid", "tanh", "exp", "erf", "abs", "sin", "cos", "log", "reciprocal"], "input"
    ),
    "relu": "input inplace=False",
    "silu": "input inplace=False",
    "gelu": "input approximate='none'",
    "softplus": "input beta=1 threshold=20",
    "softmax": "input dim=None dtype=None",
    "clamp": "input min=None max=None",
    **dict.fromkeys(("mean", "sum"), "input dim=None keepdim=False dtype=None"),
    "cat": "tensors dim=0",
    "stack": "tensors dim=0",
    "unsqueeze": "input dim",
    "transpose": "input dim0 dim1",
    "flatten": "input start_dim=0 end_dim=-1",
    "repeat_interleave": "input repeats dim=None",
    "linear": "input weight bias=None",
    "matmul": "input other",
    "bmm": "input mat2",
    "layer_norm": "input normalized_shape weight=None bias=None eps=1e-5",
    "rms_norm": "input normalized_shape weight=None eps=None",
    "dropout": "input p=0.5 training=True inplace=False",
    "type_as": "input other",
    "chunk": "input chunks dim=0",
    "split": "input split_size dim=0",
    "unbind": "input dim=0",
    "square": "input",
    "pow": "input exponent",
    "add": "input other alpha=1",
    "sub": "input other alpha=1",
    "mul": "input other",
    "div": "input other rounding_mode=None",
    "neg": "input",
    "size": "input dim=None",
    "dim": "input",
    "contiguous": "input memory_format=None",
    "clone": "input memory_format=None",
}
_ALIASES = {"axis": "dim", "split_size_or_sections": "split_size", "x": "input", "self": "input", "start": "start_dim"}
_SAME = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "negative": "neg",
}
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


def _names() -> dict[Any, str]:
    known: dict[Any, str] = {}
    for name in [*_SIGNATURES, *_SAME]:
        for holder in (F, torch):
            function = getattr(holder, name, None)
            if callable(function):
                known[function] = name
    return known


_FUNCTIONS = _names()


def function_name(function: object) -> str | None:
    """The name under which ``apply`` knows a function of torch; None if it is none of those listed."""
    try:
        return _FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None


def apply(name: str, args: Args, kwargs: Kwargs) -> Expr:
    """A function of torch, or a method of a tensor, of these arguments.

    Raises:
        Unreadable: it changes a tensor in place, or writes to ``out``.
    """
    name = _SAME.get(name, name)
    if "out" in kwargs or (name.endswith("_") and not name.startswith("_")):
        raise Unreadable(f"{name} writes to a tensor")
    if name in _CASTS and len(args) == 1:
        return cast(args[0], const(_CASTS[name]))
    if name in ("to", "type"):
        return _to(args, kwargs)
    bound = _bind(name, args, kwargs)
    if bound is None:
        return Expr(name, (*args, *(Expr("kw", (value,), key) for key, value in sorted(kwargs.items()))))
    build = _BUILDS.get(name)
    return Expr(name, bound) if build is None else build(*bound)


def _bind(name: str, args: Args, kwargs: Kwargs) -> Args | None:
    signature = _SIGNATURES.get(name)
    if signature is None:
        return None
    values: dict[str, Any] = {}
    for parameter in signature.split():
        key, _, default = parameter.partition("=")
        values[key] = const(_default(default)) if default else _REQUIRED
    if len(args) > len(values):
        return None
    for key, value in zip(values, args, strict=False):
        values[key] = value
    for key, value in kwargs.items():
        key = key if key in values else _ALIASES.get(key, key)
        if key not in values:
            return None
        values[key] = value
    if any(value is _REQUIRED for value in values.values()):
        return None
    inplace = values.pop("inplace", const(False))
    if inplace != const(False):
        raise Unreadable(f"{name} writes to its input")
    return tuple(values.values())


def _default(text: str) -> object:
    words: dict[str, object] = {"None": None, "False": False, "True": True}
    if text in words:
        return words[text]
    if text.startswith("'"):
        return text.strip("'")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _to(args: Args, kwargs: Kwargs) -> Expr:
    """Casts; where the tensor lies is no part of what is computed."""
    x, *others = args
    others += [kwargs[name] for name in ("dtype", "other") if name in kwargs]
    for other in others:
        if other.op == "const" and isinstance(other.value, torch.dtype):
            return cast(x, other)
        if other.op == "dtype":
            return cast(x, other)
        if other.op == "const" and not isinstance(other.value, (str, torch.device, bool, type(None))):
            raise Unreadable("a cast to something unknown")
        if other.op not in ("const", "getattr"):
            return cast(x, dtype_of(other))
    return x


def _dropout(x: Expr, p: Expr, training: Expr) -> Expr:
    return x if number(p) == 0 or training == const(False) else Expr("dropout", (x, p, training))


def _split(x: Expr, size: Expr, dim: Expr) -> Expr:
    sizes = size.args if size.op == "tuple" else ()
    if not sizes or number(dim) != -1:
        return Expr("split", (x, size, dim))
    pieces, start = [], const(0)
    for n, width in enumerate(sizes):
        stop = NONE if n == len(sizes) - 1 else add(start, width)
        pieces.append(piece(x, start, stop, NONE))
        start = stop
    return tuple_of(*pieces)


def _chunk(x: Expr, chunks: Expr, dim: Expr) -> Expr:
    count = number(chunks)
    if count is None:
        return Expr("chunk", (x, chunks, dim))
    if count == 2 and number(dim) == -1:
        return tuple_of(half(x, 0), half(x, 1))
    whole = Expr("chunk", (x, chunks, dim))
    return tuple_of(*(Expr("item", (whole, const(n))) for n in range(int(count))))


def item(x: Expr, index: int) -> Expr:
    """One of what an expression gives: an element of a tuple, a part of a split, a size."""
    if x.op == "tuple":
        return x.args[index]
    if x.op == "shape":
        return Expr("size", (x.args[0], const(index)))
    if x.op == "split" and number(x.args[2]) == -1 and index >= 0:
        tensor, width, _ = x.args
        if width == half(tensor, 0).args[2]:
            return half(tensor, index)
        return piece(tensor, mul(const(index), width), mul(const(index + 1), width), NONE)
    if x.op == "unbind" and number(x.args[1]) == -1:
        return Expr("select", (x.args[0], const(index)))
    return Expr("item", (x, const(index)))


def _keep(x: Expr, *ignored: Expr) -> Expr:
    return x


def _plain(combine: Callable[[Expr, Expr], Expr], neutral: float | None) -> Callable[..., Expr]:
    def build(a: Expr, b: Expr, option: Expr = NONE) -> Expr:
        plain = option == NONE or number(option) == neutral
        return combine(a, b) if plain else Expr(combine.__name__, (a, b, option))

    return build


_BUILDS: dict[str, Callable[..., Expr]] = {
    "square": lambda x: power(x, const(2)),
    "pow": power,
    "add": _plain(add, 1),
    "sub": _plain(sub, 1),
    "mul": mul,
    "div": _plain(div, None),
    "neg": neg,
    "dropout": _dropout,
    "split": _split,
    "chunk": _chunk,
    "type_as": lambda x, other: cast(x, dtype_of(other)),
    "size": lambda x, dim: Expr("shape", (x,)) if dim == NONE else Expr("size", (x, dim)),
    "contiguous": _keep,
    "clone": _keep,
}

#: Functions of Python that are computed where all arguments are known.
COMPUTED: frozenset[Any] = frozenset(
    {int, float, bool, str, len, min, max, abs, round, sum, tuple, list, range, enumerate, zip, reversed, sorted}
    | {isinstance, issubclass, getattr, hasattr, torch.finfo, torch.device, type}
    | {getattr(math, name) for name in ("sqrt", "log", "log2", "exp", "floor", "ceil", "prod", "pow", "gcd")}
)
