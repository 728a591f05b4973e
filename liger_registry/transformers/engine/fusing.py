"""Code whose norms are computed together with what comes before or after them: what residual and q/k norms share."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import FunctionType

from torch import nn
from torch.nn.modules import module as calling

from liger_registry.transformers.engine.calls import hooked
from liger_registry.transformers.engine.norms import NormForward
from liger_registry.transformers.engine.rebuild import CannotRebuild, chain, syntax


def norm_of(norm: object) -> NormForward | None:
    """The ``rms_norm`` that a module would compute when it is called now; None if anything else would run too."""
    if not isinstance(norm, nn.Module) or hooked(norm):
        return None
    if calling._global_forward_hooks or calling._global_forward_pre_hooks:
        return None
    if calling._global_backward_hooks or calling._global_backward_pre_hooks:
        return None
    forward = getattr(norm.forward, "__self__", None)
    return forward if type(forward) is NormForward and forward.formula.op == "rms_norm" else None


def why_not(norm: object, name: str) -> str:
    """Why a norm stays a call of its own."""
    if not isinstance(norm, nn.Module):
        return f"{name} is no module"
    if hooked(norm):
        return f"{name} has hooks"
    return f"{name} is no rms_norm of the registry's"


def definition(function: object) -> ast.FunctionDef | None:
    """The syntax of a method under its decorators; None if it has none that can be built again."""
    if not isinstance(function, FunctionType):
        return None
    try:
        return syntax(chain(function)[-1])
    except CannotRebuild:
        return None


def straight(body: Sequence[ast.stmt]) -> Iterator[tuple[int, ast.stmt]]:
    """The statements of a function that run in every call, up to the first ``return``, with their places."""
    for n, statement in enumerate(body):
        # A return below a condition ends what is certain, too.
        if any(isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) for node in ast.walk(statement)):
            return
        yield n, statement


def attribute_of_self(node: ast.expr, owner: str) -> str | None:
    """The name in ``self.name``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
        return node.attr
    return None


def single_name(statement: ast.stmt) -> str | None:
    """The one variable that an assignment sets."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def only_argument(call: ast.expr) -> ast.expr | None:
    """The argument of a call with one, given by its position."""
    if isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords:
        argument = call.args[0]
        return None if isinstance(argument, ast.Starred) else argument
    return None
