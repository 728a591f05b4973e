"""What an expression comes to for tensors of given dtypes, every rounding spelled out.

Casts that change nothing are dropped, those that PyTorch's promotion makes are put in, and conditions on dtypes are
decided. So ``weight * x.to(input_dtype)`` and ``(weight * x).to(input_dtype)`` are one expression for float32 tensors,
and two for bfloat16. In float32, whose last digit no two kernels share, ``1 / sqrt(v)`` and ``v ** -0.5`` are
``rsqrt(v)``; in narrower dtypes each rounds in its own places and stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from liger_registry.transformers.engine.expressions import (
    NONE,
    Expr,
    add,
    cast,
    const,
    dtype_of,
    mul,
    number,
    rebuilt,
    sub,
)

Dtypes = Mapping[Expr, torch.dtype]
_EXACT = (torch.float32, torch.float64)
# Functions that return the dtype of their first argument; what else they take are numbers.
_UNARY = frozenset(
    ("neg", "rsqrt", "sqrt", "sigmoid", "tanh", "relu", "silu", "gelu", "exp", "erf", "abs", "softplus", "clamp")
)
_TO_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_PROMOTING = frozenset(("add", "mul", "div"))


class Unrounded(Exception):
    """An expression whose dtypes cannot be told."""


def rounded(expr: Expr, dtypes: Dtypes) -> Expr:
    """The expression for tensors of these dtypes.

    Args:
        expr: of a reading.
        dtypes: of each parameter and attribute in it; scalars are no tensors.

    Raises:
        Unrounded: it has a tensor that is not listed, or a function whose result has a dtype that is not known.
    """
    return _rounded(expr, dtypes)[0]


def _rounded(expr: Expr, dtypes: Dtypes) -> tuple[Expr, torch.dtype | None]:
    """The expression and its dtype; None for a number, which has none of its own."""
    if expr in dtypes:
        return expr, dtypes[expr]
    op = expr.op
    if op in ("const", "hole"):
        return expr, None
    if op == "cast":
        return _cast(expr, dtypes)
    if op == "dtype":
        return const(_rounded(expr.args[0], dtypes)[1]), None
    if op == "if":
        return _rounded(expr.args[1] if _decided(expr.args[0], dtypes) else expr.args[2], dtypes)
    if op in _PROMOTING:
        return _promoted(expr, dtypes)
    if op == "pow":
        base, dtype = _rounded(expr.args[0], dtypes)
        return _power(base, expr.args[1], dtype), dtype
    if op in ("mean", "sum"):
        inner, dtype = _rounded(expr.args[0], dtypes)
        if expr.args[3].value is not None:
            raise Unrounded(f"{op} in another dtype")
        return rebuilt(expr, (inner, *expr.args[1:])), dtype
    if op in _UNARY:
        inner, dtype = _rounded(expr.args[0], dtypes)
        return rebuilt(expr, (inner, *expr.args[1:])), dtype
    if op in ("layer_norm", "rms_norm"):
        return _norm(expr, dtypes)
    raise Unrounded(f"{op} has a dtype that is not known")


def _norm(expr: Expr, dtypes: Dtypes) -> tuple[Expr, torch.dtype | None]:
    """PyTorch's own norms over the last dimension: all of it in float32, rounded once to the dtype of x."""
    x, shape, weight, *bias, eps = expr.args
    dtype = _rounded(x, dtypes)[1]
    if len(_sizes(shape)) != 1 or dtype not in _TO_SINGLE or number(eps) is None:
        raise Unrounded(f"{expr.op} over several dimensions, or without an eps")
    wide = const(torch.float32)
    result = (standardised if bias else normalised)(cast(x, wide), eps)
    if weight != NONE:
        result = mul(result, cast(weight, wide))
    if bias and bias[0] != NONE:
        result = add(result, cast(bias[0], wide))
    return _rounded(cast(result, dtype_of(x)), dtypes)


def _sizes(shape: Expr) -> tuple[object, ...]:
    if shape.op == "tuple":
        return shape.args
    return shape.value if isinstance(shape.value, tuple) else ()


def _mean(x: Expr) -> Expr:
    return Expr("mean", (x, const(-1), const(True), NONE))


def normalised(x: Expr, eps: Expr) -> Expr:
    """``x * rsqrt(mean(x ** 2) + eps)`` over the last dimension."""
    return mul(x, Expr("rsqrt", (add(_mean(mul(x, x)), eps),)))


def standardised(x: Expr, eps: Expr) -> Expr:
    """``(x - mean(x)) * rsqrt(var(x) + eps)`` over the last dimension."""
    return normalised(sub(x, _mean(x)), eps)


def _cast(expr: Expr, dtypes: Dtypes) -> tuple[Expr, torch.dtype | None]:
    inner, dtype = _rounded(expr.args[0], dtypes)
    to = _rounded(expr.args[1], dtypes)[0].value
    if not isinstance(to, torch.dtype) or dtype is None:
        raise Unrounded("a cast to something unknown")
    return _into(inner, dtype, to), to


def _into(expr: Expr, dtype: torch.dtype, to: torch.dtype) -> Expr:
    """A cast; the ``path`` of the node keeps the dtype it is from, so that going there and back is nothing."""
    if dtype == to:
        return expr
    if expr.op == "cast" and expr.path == str(to) and torch.promote_types(dtype, to) == dtype:
        return expr.args[0]
    return Expr("cast", (expr, const(to)), None, str(dtype))


def _promoted(expr: Expr, dtypes: Dtypes) -> tuple[Expr, torch.dtype | None]:
    sides = [_rounded(arg, dtypes) for arg in expr.args]
    among = [dtype for _, dtype in sides if dtype is not None]
    if not among:
        return expr, None
    dtype = among[0] if len(among) == 1 else torch.promote_types(*among)
    first, second = (side if own is None else _into(side, own, dtype) for side, own in sides)
    if expr.op == "div" and dtype in _EXACT:
        return _quotient(first, second), dtype
    return rebuilt(expr, (first, second)), dtype


def _quotient(a: Expr, b: Expr) -> Expr:
    """A quotient by a root as the product with its reciprocal."""
    if b.op != "sqrt":
        return rebuilt(Expr("div", (a, b)), (a, b))
    root = Expr("rsqrt", b.args)
    return root if number(a) == 1 else mul(a, root)


def _power(base: Expr, exponent: Expr, dtype: torch.dtype | None) -> Expr:
    if number(exponent) == -0.5 and dtype in _EXACT:
        return Expr("rsqrt", (base,))
    return rebuilt(Expr("pow", (base, exponent)), (base, exponent))


def _decided(condition: Expr, dtypes: Dtypes) -> bool:
    """A condition on dtypes.

    Raises:
        Unrounded: it is on something else.
    """
    if condition.op == "not":
        return not _decided(condition.args[0], dtypes)
    if condition.op in ("and", "or"):
        sides = [_decided(arg, dtypes) for arg in condition.args]
        return all(sides) if condition.op == "and" else any(sides)
    if condition.op in ("eq", "in"):
        left, right = (_plain(arg, dtypes) for arg in condition.args)
        if condition.op == "eq":
            return left == right
        if isinstance(right, tuple):
            return left in right
    raise Unrounded(f"a branch on {condition.op}")


def _plain(expr: Expr, dtypes: Dtypes) -> object:
    if expr.op == "tuple":
        return tuple(_plain(arg, dtypes) for arg in expr.args)
    if expr.op not in ("dtype", "const"):
        raise Unrounded(f"a branch on {expr.op}")
    return _rounded(expr, dtypes)[0].value
