"""Formulas with holes, compared with expressions.

    holes = match(mul(hole("x"), rsqrt), expr)       # {"x": Expr} or None

A hole takes any expression, the same one wherever it occurs; ``hole("eps", "const")`` takes only nodes of that kind.
"""

from __future__ import annotations

from liger_registry.transformers.engine.expressions import Expr

_COMMUTATIVE = ("add", "mul")
Holes = dict[str, Expr]


def hole(name: str, *kinds: str) -> Expr:
    """A place in a formula that takes any expression, or one of some kinds."""
    return Expr("hole", (), (name, *kinds))


def match(formula: Expr, expr: Expr, holes: Holes | None = None) -> Holes | None:
    """What the holes of a formula stand for in an expression; None if it is not of that form."""
    holes = {} if holes is None else holes
    if formula.op == "hole":
        name, *kinds = formula.value
        if name in holes:
            return holes if holes[name] == expr else None
        return {**holes, name: expr} if not kinds or expr.op in kinds else None
    if formula.op != expr.op or len(formula.args) != len(expr.args) or formula.value != expr.value:
        return None
    found = _all(formula.args, expr.args, holes)
    if found is None and formula.op in _COMMUTATIVE:
        found = _all(formula.args, expr.args[::-1], holes)
    return found


def _all(formulas: tuple[Expr, ...], exprs: tuple[Expr, ...], holes: Holes) -> Holes | None:
    for formula, expr in zip(formulas, exprs, strict=True):
        found = match(formula, expr, holes)
        if found is None:
            return None
        holes = found
    return holes
