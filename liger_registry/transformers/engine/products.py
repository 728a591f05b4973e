"""Gated products in code: ``act(a) * b``, found in the syntax of a function and written anew there.

Rewriting is local. ``act(a) * b`` becomes ``product(act, gate=a, up=b)``, whose parts are evaluated in their order:
nothing else of the function need be understood, and loops, branches and calls stay what they are. A name in between
(``g = act(a)`` and later ``g * b``) is followed if it is bound once and used once. Where ``gate, up = p.chunk(2, -1)``
goes into the product and nowhere else, the product takes ``p`` as it is.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAME = "liger_registry_product"

#: A function's expression (``self.act_fn``) to whether it is an activation that is looked for.
Judge = Callable[[ast.expr], bool]


@dataclass
class Product:
    """One gated product.

    Attributes:
        node: the product.
        act: the activation's expression.
        gate: what it is called with.
        up: the other factor.
        gate_first: whether the activation stands on the left.
        alias: the statement that names the activation's result, if there is one between.
        packed: the statement that parts gate and up, if the product can take them together.
        scale: a number of the module that the gate is multiplied with.
    """

    node: ast.BinOp
    act: ast.expr
    gate: ast.expr
    up: ast.expr
    gate_first: bool
    alias: ast.Assign | None = None
    packed: ast.Assign | None = None
    scale: ast.expr | None = None


def products(function: ast.FunctionDef, judge: Judge, is_number: Judge) -> Iterator[Product]:
    """The gated products of a function."""
    for block in _blocks(function):
        for statement in block:
            for node in _own(statement):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                    found = _product(function, block, statement, node, judge)
                    if found is not None:
                        _scaled(found, is_number)
                        yield found


def rewrite(function: ast.FunctionDef, wanted: list[Product]) -> None:
    """Write some of a function's gated products anew, in place."""
    for found in wanted:
        gate, up = found.gate, found.up
        if found.alias is not None:
            found.alias.value, gate = gate, _load(_target(found.alias))
        if found.packed is not None:
            assert isinstance(found.packed.value, ast.Call)
            assert isinstance(found.packed.value.func, ast.Attribute)
            whole = found.packed.value.func.value
            found.packed.targets, found.packed.value = [ast.Name(_packed_name(gate), ast.Store())], whole
            up = ast.Constant(None)
            gate = _load(_packed_name(gate))
        keywords = [ast.keyword("gate", gate), ast.keyword("up", up)]
        if found.scale is not None:
            keywords.insert(1, ast.keyword("gate_multiplier", found.scale))
        if not found.gate_first:
            keywords.insert(0, keywords.pop())
        call = ast.Call(_load(NAME), [copy.deepcopy(found.act)], keywords)
        _Replace(found.node, call).visit(function)


def _scaled(found: Product, is_number: Judge) -> None:
    """Take a number that the gate is multiplied with out of it: ``act(gate * self.multiplier)``."""
    gate = found.gate
    if isinstance(gate, ast.BinOp) and isinstance(gate.op, ast.Mult) and is_number(gate.right):
        found.gate, found.scale = gate.left, gate.right


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def _packed_name(gate: ast.expr) -> str:
    assert isinstance(gate, ast.Name)
    return gate.id


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _target(statement: ast.Assign) -> str:
    (target,) = statement.targets
    assert isinstance(target, ast.Name)
    return target.id


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements in a function, not of functions in it."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
            for statement in block:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _blocks(statement)


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that are in no block of its own, nor in a function."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        children = ast.iter_child_nodes(node)
        waiting += [child for child in children if not (node is statement and isinstance(child, ast.stmt))]


def _activated(node: ast.expr, judge: Judge) -> ast.Call | None:
    """A call of an activation with one tensor."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and judge(node.func):
        return None if isinstance(node.args[0], ast.Starred) else node
    return None


def _product(
    function: ast.FunctionDef, block: list[ast.stmt], statement: ast.stmt, node: ast.BinOp, judge: Judge
) -> Product | None:
    for factor, other, first in ((node.left, node.right, True), (node.right, node.left, False)):
        call = _activated(factor, judge)
        alias = None
        if call is None and isinstance(factor, ast.Name):
            alias = _binding(function, block, statement, factor)
            call = None if alias is None else _activated(alias.value, judge)
        if call is not None:
            found = Product(node, call.func, call.args[0], other, first, alias)
            if alias is None:
                found.packed = _parted(function, block, statement, found)
            return found
    return None


def _uses(function: ast.AST, name: str) -> list[ast.Name]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]


def _binding(
    function: ast.FunctionDef, block: list[ast.stmt], statement: ast.stmt, name: ast.Name
) -> ast.Assign | None:
    """The statement before this one in its block that binds a name bound nowhere else and used here alone."""
    for earlier in block[: block.index(statement)]:
        if isinstance(earlier, ast.Assign) and len(earlier.targets) == 1 and isinstance(earlier.targets[0], ast.Name):
            target = earlier.targets[0]
            if target.id == name.id and {id(u) for u in _uses(function, name.id)} == {id(target), id(name)}:
                return earlier
    return None


def _parted(function: ast.FunctionDef, block: list[ast.stmt], statement: ast.stmt, found: Product) -> ast.Assign | None:
    """``gate, up = p.chunk(2, dim=-1)`` before this statement, both names used in this product and nowhere else."""
    if not isinstance(found.gate, ast.Name) or not isinstance(found.up, ast.Name) or found.gate.id == found.up.id:
        return None
    before = block[: block.index(statement)]
    for n in range(len(before) - 1, -1, -1):
        earlier = before[n]
        stored = {
            node.id for node in ast.walk(earlier) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if not stored & {found.gate.id, found.up.id}:
            continue
        names = _halves(earlier)
        if names != (found.gate.id, found.up.id):
            return None
        assert isinstance(earlier, ast.Assign)
        after = [*before[n + 1 :], statement]
        free = all(_only_here(function, earlier, after, statement, name) for name in (found.gate, found.up))
        return earlier if free else None
    return None


def _halves(statement: ast.stmt) -> tuple[str, str] | None:
    """The two names of ``gate, up = p.chunk(2, dim=-1)``."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return None
    target, call = statement.targets[0], statement.value
    if not (isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(call, ast.Call)):
        return None
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "chunk"):
        return None
    given = [ast.unparse(arg) for arg in call.args] + [f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords]
    first, second = target.elts
    if given not in (["2", "-1"], ["2", "dim=-1"], ["chunks=2", "dim=-1"]):
        return None
    return (first.id, second.id) if isinstance(first, ast.Name) and isinstance(second, ast.Name) else None


def _only_here(
    function: ast.FunctionDef, parted: ast.Assign, after: list[ast.stmt], statement: ast.stmt, name: ast.Name
) -> bool:
    """Whether a name's value from where it is parted is used in this product alone.

    It may be bound before, and bound again by the very statement of the product.
    """
    inside = {id(node) for node in ast.walk(parted)}
    later = {id(node) for part in after for node in ast.walk(part)}
    again = isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name.id for target in statement.targets
    )
    position = (parted.lineno, parted.col_offset)
    loops = any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(function))
    for use in _uses(function, name.id):
        if use is name or id(use) in inside:
            continue
        if isinstance(use.ctx, ast.Load):
            # In a loop what comes before comes after, too.
            before = (use.lineno, use.col_offset) < position and not loops
            if id(use) in later or not (before or again):
                return False
    return True


def projected(function: ast.FunctionDef, expr: ast.expr, projects: Callable[[ast.expr], bool]) -> bool:
    """Whether a value comes from a linear map within the function, through whatever names.

    Args:
        function: the function.
        expr: the value.
        projects: whether a call or a product of matrices is a linear map.
    """
    waiting, seen = [expr], set[str]()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, (ast.Call, ast.BinOp)) and projects(node):
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                waiting += _values(function, node.id)
    return False


def _values(function: ast.FunctionDef, name: str) -> list[ast.expr]:
    """Everything that a name is bound to."""
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(target))
    ]
