"""Expressions of Python evaluated on symbols: the half of ``interpreting`` that has no statements."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

from liger_registry.transformers.engine import expressions as ex
from liger_registry.transformers.engine.expressions import NONE, Expr
from liger_registry.transformers.engine.values import Known, Value, as_expr, known
from liger_registry.transformers.engine.vocabulary import Unreadable

_BINARY: dict[type, tuple[Callable[[Any, Any], Any], Callable[[Expr, Expr], Expr]]] = {
    ast.Add: (operator.add, ex.add),
    ast.Sub: (operator.sub, ex.sub),
    ast.Mult: (operator.mul, ex.mul),
    ast.Div: (operator.truediv, ex.div),
    ast.FloorDiv: (operator.floordiv, ex.floordiv),
    ast.Pow: (operator.pow, ex.power),
    ast.Mod: (operator.mod, lambda a, b: Expr("mod", (a, b))),
    ast.MatMult: (operator.matmul, lambda a, b: Expr("matmul", (a, b))),
}
_COMPARE: dict[type, tuple[Callable[[Any, Any], Any], str, bool]] = {
    ast.Eq: (operator.eq, "eq", True),
    ast.NotEq: (operator.ne, "eq", False),
    ast.Is: (operator.is_, "is", True),
    ast.IsNot: (operator.is_not, "is", False),
    ast.In: (lambda a, b: a in b, "in", True),
    ast.NotIn: (lambda a, b: a not in b, "in", False),
    ast.Lt: (operator.lt, "lt", True),
    ast.GtE: (operator.ge, "lt", False),
    ast.Gt: (operator.gt, "gt", True),
    ast.LtE: (operator.le, "gt", False),
}
_CONDITIONS = ("eq", "is", "in", "lt", "gt", "not", "and", "or", "flag")


@dataclass
class Frame:
    """A function being read: its local names, and the object its first argument is, for ``super()``."""

    function: FunctionType
    names: dict[str, Value]
    owner: Value | None = None


@dataclass
class Evaluator:
    """One reading.

    Attributes:
        root: the module that is read; None for a function.
        read: what was read from the module, by path: what a constant is, a type for anything else.
        guards: conditions under which the code raises.
        assumes: what is taken for granted: ``autocast is off``.
        depth: of calls.
        branches: on conditions that are not known, so far.
    """

    root: nn.Module | None = None
    read: dict[str, object] = field(default_factory=dict)
    guards: list[Expr] = field(default_factory=list)
    assumes: set[str] = field(default_factory=set)
    depth: int = 0
    branches: int = 0

    def run(self, function: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:  # noqa: ANN401
        """What a function of Python returns."""
        raise NotImplementedError

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """What an expression of Python is."""
        reader = getattr(self, f"_{type(node).__name__.lower()}", None)
        if reader is None:
            raise Unreadable(f"{ast.unparse(node)!r} is nothing that can be read")
        result: Value = reader(node, frame)
        return result

    def _constant(self, node: ast.Constant, frame: Frame) -> Value:
        return Known(node.value)

    def _name(self, node: ast.Name, frame: Frame) -> Value:
        if node.id in frame.names:
            return frame.names[node.id]
        function = frame.function
        closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        try:
            if node.id in closed:
                return known(closed[node.id].cell_contents)
            if node.id in function.__globals__:
                return known(function.__globals__[node.id])
            return known(getattr(builtins, node.id))
        except (AttributeError, ValueError) as error:
            raise Unreadable(f"{node.id} is not known") from error

    def _tuple(self, node: ast.Tuple | ast.List, frame: Frame) -> Value:
        values: list[Value] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                values += self.several(self.value(element.value, frame))
            else:
                values.append(self.value(element, frame))
        return tuple(values)

    _list = _tuple

    def several(self, value: Value) -> list[Value]:
        """The elements of a tuple; of an unknown one a ``star`` that stands for them."""
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, Known):
            try:
                return [known(v) for v in value.value]
            except TypeError as error:
                raise Unreadable("it goes over what is no sequence") from error
        return list(value.args) if value.op == "tuple" else [Expr("star", (value,))]

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Value:
        condition = self.truth(self.value(node.test, frame))
        if not isinstance(condition, Expr):
            return self.value(node.body if condition else node.orelse, frame)
        return self.choose(condition, self.value(node.body, frame), self.value(node.orelse, frame))

    def choose(self, condition: Expr, then: Value, otherwise: Value) -> Value:
        """One of two values, by a condition that is not known."""
        if isinstance(then, tuple) and isinstance(otherwise, tuple) and len(then) == len(otherwise):
            return tuple(self.choose(condition, a, b) for a, b in zip(then, otherwise, strict=True))
        if isinstance(then, Known) and isinstance(otherwise, Known) and then.value is otherwise.value:
            return then
        return ex.choose(condition, as_expr(then), as_expr(otherwise))

    def truth(self, value: Value) -> bool | Expr:
        """A value as a condition."""
        if isinstance(value, Known):
            return bool(value.value)
        if isinstance(value, tuple):
            return bool(value)
        return bool(value.value) if value.op == "const" else value

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Value:
        stops, name = (False, "and") if isinstance(node.op, ast.And) else (True, "or")
        kept: list[Expr] = []
        value: Value = Known(None)
        for part in node.values:
            value = self.value(part, frame)
            condition = self.truth(value)
            if isinstance(condition, Expr):
                if condition.op not in _CONDITIONS:
                    raise Unreadable(f"the truth of {ast.unparse(part)}")
                kept.append(condition)
            elif condition is stops:
                break
        else:
            if kept:
                # What is known here changes nothing about what is not.
                return kept[0] if len(kept) == 1 else Expr(name, tuple(kept))
            return value
        return Known(stops) if kept else value

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Value:
        value = self.value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            condition = self.truth(value)
            return ex.negate(condition) if isinstance(condition, Expr) else Known(not condition)
        if isinstance(node.op, ast.USub):
            return Known(-value.value) if isinstance(value, Known) else ex.neg(as_expr(value))
        if isinstance(node.op, ast.UAdd):
            return value
        return Expr("invert", (as_expr(value),))

    def _binop(self, node: ast.BinOp, frame: Frame) -> Value:
        return self._binary(type(node.op), self.value(node.left, frame), self.value(node.right, frame))

    def _binary(self, kind: type, left: Value, right: Value) -> Value:
        if kind not in _BINARY:
            raise Unreadable(f"operator {kind.__name__}")
        compute, build = _BINARY[kind]
        if kind is ast.Add and (isinstance(left, tuple) or isinstance(right, tuple)):
            return tuple(self.several(left) + self.several(right))
        if kind is ast.Mult and isinstance(left, tuple) and isinstance(right, Known):
            return left * int(right.value)
        if isinstance(left, Known) and isinstance(right, Known):
            try:
                return known(compute(left.value, right.value))
            except Exception as error:
                raise Unreadable(f"{kind.__name__} of constants fails: {error}") from error
        return build(as_expr(left), as_expr(right))

    def _compare(self, node: ast.Compare, frame: Frame) -> Value:
        if len(node.ops) != 1:
            raise Unreadable("a chain of comparisons")
        compute, name, straight = _COMPARE[type(node.ops[0])]
        left, right = self.value(node.left, frame), self.value(node.comparators[0], frame)
        if isinstance(left, Known) and isinstance(right, (Known, tuple)):
            other = right.value if isinstance(right, Known) else [getattr(v, "value", v) for v in right]
            try:
                return Known(bool(compute(left.value, other)))
            except Exception as error:
                raise Unreadable(f"{ast.unparse(node)} fails: {error}") from error
        a, b = as_expr(left), as_expr(right)
        if name in ("is", "eq") and NONE in (a, b):
            other_side = b if a == NONE else a
            if other_side.op not in ("param", "kwargs", "if", "const"):
                return Known(not straight)  # a tensor, or what is computed from one
        if name == "is" and NONE not in (a, b):
            name = "eq"  # dtypes are compared both ways
        if a == b:
            return Known(straight if name in ("eq", "is") else not straight)
        result = Expr(name, (a, b))
        return result if straight else ex.negate(result)
