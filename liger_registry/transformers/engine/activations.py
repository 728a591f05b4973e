"""Activations by what they compute: SiLU, GELU with the error function or with tanh, and the squared ReLU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

from liger_registry.transformers.engine.expressions import Expr, brief, const
from liger_registry.transformers.engine.interpreting import Interpreter
from liger_registry.transformers.engine.reading import Unreadable, read_method
from liger_registry.transformers.engine.values import Known, as_expr

_X = Expr("param", (), "x")


@dataclass(frozen=True)
class Activation:
    """An activation, and the operation that multiplies with it.

    Attributes:
        op: ``swiglu`` or ``geglu``; ``relu_squared``, which stands alone.
        options: of the operation.
    """

    op: str
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """For the report."""
        return {"swiglu": "SiLU", "relu_squared": "squared ReLU"}.get(
            self.op, f"GELU{' with tanh' if self.options.get('approximate') == 'tanh' else ''}"
        )


def activation_of(target: Any) -> Activation:  # noqa: ANN401
    """What a module or function of one tensor computes.

    Raises:
        Unreadable: none of the four; the reason says what.
    """
    x: Expr
    if isinstance(target, nn.Module):
        if any(True for _ in target.parameters()):
            raise Unreadable(f"{type(target).__name__} has parameters")
        reading = read_method(target)
        if len(reading.parameters) != 1 or reading.guards or reading.assumes:
            raise Unreadable(f"{type(target).__name__} is no function of one tensor")
        x, result = Expr("param", (), reading.parameters[0]), reading.result
    elif callable(target):
        x, result = _X, as_expr(Interpreter().call(Known(target), [_X], {}))
    else:
        raise Unreadable(f"{type(target).__name__} is no activation")
    found = _activation(result, x)
    if found is None:
        raise Unreadable(f"activation {_name(target)} is {brief(result, 100)}")
    return found


def _activation(result: Expr, x: Expr) -> Activation | None:
    if result == Expr("silu", (x,)):
        return Activation("swiglu")
    if result == Expr("pow", (Expr("relu", (x,)), const(2))):
        return Activation("relu_squared")
    if result.op == "gelu" and result.args[0] == x and result.args[1].value in ("none", "tanh"):
        return Activation("geglu", {"approximate": result.args[1].value})
    return None


def _name(target: object) -> str:
    if isinstance(target, functools.partial):
        return _name(target.func)
    return target.__name__ if isinstance(target, FunctionType) else type(target).__name__
