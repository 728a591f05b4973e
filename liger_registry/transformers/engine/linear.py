"""Functions whose code does nothing but arithmetic on their tensors, and moves columns about.

What such a function computes is a polynomial of its inputs, with the same operations whatever their values and sizes:
it has no branches but on arguments that are None, no divisions, no functions of numbers, and no large constants. Two
of them that agree on random numbers, in sizes beyond their constants, are the same. Roundings are left for that
comparison.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from liger_registry.transformers.engine.rebuild import CannotRebuild, chain, syntax

LARGEST_CONSTANT = 4

# Functions of torch and methods of tensors that are linear in each tensor, or only look at sizes and dtypes.
_CALLS = frozenset(
    """
    cat stack concat concatenate flatten unflatten unsqueeze squeeze repeat repeat_interleave expand chunk split unbind
    view reshape transpose permute narrow index_select contiguous to float type_as type view_as_complex view_as_real
    size dim ndimension mul add sub neg sum
    """.split()  # noqa: SIM905 - a list of them takes forty lines
)
_ATTRIBUTES = frozenset(["shape", "ndim", "dtype", "device", "real", "imag", "mT", "T"])
_BUILTINS: tuple[object, ...] = (enumerate, range, len, list, tuple, zip, reversed)
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Return, ast.If, ast.FunctionDef)
_SIMPLE = (ast.Name, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Slice, ast.Starred)
_EXPRESSIONS = (*_SIMPLE, ast.Attribute, ast.Call, ast.keyword, ast.ListComp, ast.GeneratorExp, ast.comprehension)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Load, ast.Store, ast.Is, ast.IsNot)


class NotLinear(Exception):
    """Code that does something else; ``reason`` says what, for the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def inputs_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that a function uses, in order.

    Raises:
        NotLinear: its code does something else, or cannot be read.
    """
    try:
        layers = chain(function)
    except CannotRebuild as error:
        raise NotLinear(error.reason) from error
    if len(layers) > 1:
        raise NotLinear(f"{layers[-1].__name__} is wrapped by {layers[0].__code__.co_name}")
    tree = _check(layers[0], [])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    arguments = tree.args
    if arguments.vararg is not None:
        raise NotLinear(f"it takes *{arguments.vararg.arg}")
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg in used)


def _check(function: FunctionType, above: list[FunctionType]) -> ast.FunctionDef:
    if function in above:
        raise NotLinear(f"{function.__name__} calls itself")
    try:
        tree = syntax(function)
    except CannotRebuild as error:
        raise NotLinear(error.reason) from error
    local = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node is not tree}
    for node in _within(tree.body):
        _check_node(node)
        if isinstance(node, ast.Call):
            _check_call(node.func, function, local, above)
        elif isinstance(node, ast.Attribute) and not _attribute_is_known(node, function):
            raise NotLinear(f"it uses {ast.unparse(node)}")
        elif isinstance(node, ast.Name) and not _is_free(_global(node, function)):
            raise NotLinear(f"it uses {node.id}, which is not its own")
    return tree


def _within(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node, without docstrings, what is called, and conditions about None."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        if isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                raise NotLinear(f"it decorates {node.name}")
            pending += [*node.body, *node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
        elif isinstance(node, ast.If):
            if not _asks_for_none(node.test):
                raise NotLinear(f"it depends on whether {ast.unparse(node.test)}")
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.AnnAssign):
            pending += [node.target, *([node.value] if node.value else [])]
        elif isinstance(node, ast.Call):
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            pending += [*inner, *node.args, *node.keywords]
        else:
            pending += ast.iter_child_nodes(node)


def _asks_for_none(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and isinstance(test.ops[0], (ast.Is, ast.IsNot))
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
        and len(test.ops) == 1
    )


def _check_node(node: ast.AST) -> None:
    if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_OPERATORS)):
        text = ast.unparse(node).splitlines()[0] if isinstance(node, (ast.expr, ast.stmt)) else type(node).__name__
        raise NotLinear(f"it computes {text}")
    if isinstance(node, ast.Constant):
        number = isinstance(node.value, (int, float, complex)) and not isinstance(node.value, bool)
        if number and not (isinstance(node.value, int) and abs(node.value) <= LARGEST_CONSTANT):
            raise NotLinear(f"it has the constant {node.value!r}")
    if isinstance(node, ast.comprehension) and (node.ifs or node.is_async):
        raise NotLinear("it leaves something out of a list")
    stored = isinstance(node, (ast.Attribute, ast.Subscript, ast.Name)) and not isinstance(node.ctx, ast.Load)
    if stored and not isinstance(node, ast.Name):
        raise NotLinear(f"it writes to {ast.unparse(node)}")


def _attribute_is_known(node: ast.Attribute, function: FunctionType) -> bool:
    if node.attr in _ATTRIBUTES:
        return True
    return isinstance(_global(node, function), torch.dtype)


def _global(node: ast.expr, function: FunctionType) -> Any:  # noqa: ANN401
    """What a name, or an attribute of a module, is outside of the function; None if it is nothing there."""
    if isinstance(node, ast.Attribute):
        owner = _global(node.value, function)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    code = function.__code__
    if not isinstance(node, ast.Name) or node.id in (*code.co_varnames, *code.co_cellvars):
        return None
    if node.id in code.co_freevars:
        return (function.__closure__ or ())[code.co_freevars.index(node.id)].cell_contents
    return function.__globals__.get(node.id, getattr(builtins, node.id, None))


def _is_free(value: object) -> bool:
    return value is None or value is torch


def _check_call(called: ast.expr, function: FunctionType, local: set[str], above: list[FunctionType]) -> None:
    if isinstance(called, ast.Attribute):
        owner = _global(called.value, function)
        if called.attr in _CALLS and (owner is None or owner is torch):
            return
        raise NotLinear(f"it calls {ast.unparse(called)}")
    if isinstance(called, ast.Name):
        target = _global(called, function)
        if called.id in local or any(target is builtin for builtin in _BUILTINS):
            return
        if isinstance(target, FunctionType):
            _check(target, [*above, function])
            return
    raise NotLinear(f"it calls {ast.unparse(called)}")
