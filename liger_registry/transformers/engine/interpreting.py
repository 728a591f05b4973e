"""Straight-line Python evaluated on symbols: what ``reading`` is made of.

A value is an ``Expr`` (a tensor, or a number that depends on one), a ``Known`` (an object of Python that is there while
reading) or a tuple of values. Branches on known conditions are followed; after others both sides are kept as an ``if``,
and what a branch raises on is kept as a guard. Loops, writes and whatever else is not listed here are unreadable.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch

from liger_registry.transformers.engine import expressions as ex
from liger_registry.transformers.engine.calling import Caller
from liger_registry.transformers.engine.evaluating import Frame
from liger_registry.transformers.engine.expressions import Expr, const
from liger_registry.transformers.engine.rebuild import CannotRebuild, syntax
from liger_registry.transformers.engine.values import Known, Value, innermost, known
from liger_registry.transformers.engine.vocabulary import Unreadable, item

_DEEPEST = 12
_MOST_BRANCHES = 64


class _Raised:
    """What a block comes to that raises."""


class Interpreter(Caller):
    """Functions and statements."""

    # -- functions ---------------------------------------------------------------------------------------------------

    def run(self, function: Any, args: Sequence[Value], kwargs: dict[str, Value]) -> Value:  # noqa: ANN401
        """What a function of Python returns."""
        inner = innermost(function)
        if self.depth >= _DEEPEST:
            raise Unreadable(f"{inner.__name__} calls itself, or too deep")
        try:
            tree = syntax(inner)
        except CannotRebuild as error:
            raise Unreadable(error.reason) from error
        frame = Frame(inner, self._bound(inner, tree.args, list(args), dict(kwargs)), args[0] if args else None)
        self.depth += 1
        result = self.block(tree.body, frame)
        self.depth -= 1
        if isinstance(result, _Raised):
            raise Unreadable(f"{inner.__name__} raises")
        return Known(None) if result is None else result

    def _bound(
        self, function: FunctionType, spec: ast.arguments, args: list[Value], kwargs: dict[str, Value]
    ) -> dict[str, Value]:
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        bound: dict[str, Value] = {}
        defaults = dict(zip(names[::-1], (function.__defaults__ or ())[::-1], strict=False))
        defaults.update(function.__kwdefaults__ or {})
        if len(args) > len(names):
            if spec.vararg is None:
                raise Unreadable(f"{function.__name__} is called with too much")
            bound[spec.vararg.arg] = tuple(args[len(names) :])
        elif spec.vararg is not None:
            bound[spec.vararg.arg] = ()
        bound.update(zip(names, args, strict=False))
        for name in [*names, *(a.arg for a in spec.kwonlyargs)]:
            if name in kwargs:
                bound[name] = kwargs.pop(name)
            elif name not in bound:
                if name not in defaults:
                    raise Unreadable(f"{function.__name__} lacks {name}")
                bound[name] = known(defaults[name])
        if spec.kwarg is not None:
            bound[spec.kwarg.arg] = kwargs.pop("**", Known({}) if not kwargs else Expr("kwargs"))
        elif kwargs:
            raise Unreadable(f"{function.__name__} takes no {next(iter(kwargs))}")
        return bound

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], frame: Frame) -> Value | _Raised | None:
        """Run statements; the value returned, None if the end is reached."""
        for n, statement in enumerate(body):
            if isinstance(statement, ast.Return):
                return Known(None) if statement.value is None else self.value(statement.value, frame)
            if isinstance(statement, ast.Raise):
                return _Raised()
            if isinstance(statement, ast.If):
                condition = self.truth(self.value(statement.test, frame))
                if isinstance(condition, Expr):
                    return self._branch(condition, statement, body[n + 1 :], frame)
                return self.block([*(statement.body if condition else statement.orelse), *body[n + 1 :]], frame)
            if isinstance(statement, ast.With):
                self._check_context(statement, frame)
                return self.block([*statement.body, *body[n + 1 :]], frame)
            self._plain_statement(statement, frame)
        return None

    def _branch(
        self, condition: Expr, statement: ast.If, rest: Sequence[ast.stmt], frame: Frame
    ) -> Value | _Raised | None:
        """Both sides of an ``if``, and what comes after it."""
        returns = any(
            isinstance(node, ast.Return) for part in statement.body + statement.orelse for node in ast.walk(part)
        )
        self.branches += 1
        if self.branches > _MOST_BRANCHES:
            raise Unreadable("it branches too often")
        frames = [Frame(frame.function, dict(frame.names), frame.owner) for _ in range(2)]
        sides = (statement.body, statement.orelse)
        then, otherwise = (
            self.block([*side, *(rest if returns else ())], own) for side, own in zip(sides, frames, strict=True)
        )
        if isinstance(then, _Raised) and isinstance(otherwise, _Raised):
            return _Raised()
        if isinstance(then, _Raised) or isinstance(otherwise, _Raised):
            raises = isinstance(then, _Raised)
            self.guards.append(condition if raises else ex.negate(condition))
            frame.names = frames[raises].names
            if returns:
                return otherwise if raises else then
        elif returns:
            values = [Known(None) if value is None else value for value in (then, otherwise)]
            return self.choose(condition, *values)
        else:
            first, second = (own.names for own in frames)
            frame.names = {n: self.choose(condition, first[n], second[n]) for n in first if n in second}
        return self.block(rest, frame)

    def _check_context(self, statement: ast.With, frame: Frame) -> None:
        """Only contexts that switch autocast off are looked through."""
        for entry in statement.items:
            call = entry.context_expr
            name = ast.unparse(call.func).rsplit(".", 1)[-1] if isinstance(call, ast.Call) else ""
            off = [k for k in getattr(call, "keywords", ()) if k.arg == "enabled"]
            if name not in ("autocast", "maybe_autocast") or not off or self.value(off[0].value, frame) != Known(False):
                raise Unreadable(f"it runs under {ast.unparse(call)}")
            self.assumes.add("autocast is off")

    def _plain_statement(self, statement: ast.stmt, frame: Frame) -> None:
        if isinstance(statement, ast.Assign):
            value = self.value(statement.value, frame)
            for target in statement.targets:
                self.assign(target, value, frame)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                self.assign(statement.target, self.value(statement.value, frame), frame)
        elif isinstance(statement, ast.Assert):
            condition = self.truth(self.value(statement.test, frame))
            if isinstance(condition, Expr):
                self.guards.append(ex.negate(condition))
            elif not condition:
                raise Unreadable("an assertion that fails")
        elif isinstance(statement, ast.AugAssign):
            self._augment(statement, frame)
        elif not (
            isinstance(statement, ast.Pass)
            or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        ):
            raise Unreadable(f"line {ast.unparse(statement).splitlines()[0]!r} is none that can be read")

    def _augment(self, statement: ast.AugAssign, frame: Frame) -> None:
        """``+=`` and the like, of numbers and tuples; on a tensor they write."""
        before = self.value(ast.parse(ast.unparse(statement.target), mode="eval").body, frame)
        if isinstance(before, Expr) and before.op not in ("size", "const"):
            raise Unreadable(f"{ast.unparse(statement)!r} writes to a tensor")
        value = self._binary(type(statement.op), before, self.value(statement.value, frame))
        self.assign(statement.target, value, frame)

    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Bind a target, which may be several names."""
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
            return
        if not isinstance(target, (ast.Tuple, ast.List)):
            raise Unreadable(f"it writes to {ast.unparse(target)}")
        targets = target.elts
        starred = [n for n, t in enumerate(targets) if isinstance(t, ast.Starred)]
        if starred:
            self._assign_starred(targets, starred[0], value, frame)
            return
        if isinstance(value, Known) and isinstance(value.value, (tuple, list, torch.Size)):
            value = tuple(known(v) for v in value.value)
        if isinstance(value, Expr):
            value = tuple(item(value, n) for n in range(len(targets)))
        if not isinstance(value, tuple) or len(value) != len(targets):
            raise Unreadable(f"{ast.unparse(target)} cannot be told apart")
        for one, part in zip(targets, value, strict=True):
            self.assign(one, part, frame)

    def _assign_starred(self, targets: list[ast.expr], star: int, value: Value, frame: Frame) -> None:
        after = len(targets) - star - 1
        inner = targets[star]
        assert isinstance(inner, ast.Starred)
        if isinstance(value, tuple):
            parts: list[Value] = [*value[:star], value[star : len(value) - after], *value[len(value) - after :]]
        elif isinstance(value, Expr) and value.op == "shape":
            middle = Expr("sizes", (value.args[0], const(star), const(-after if after else None)))
            parts = [*(item(value, n) for n in range(star)), (Expr("star", (middle,)),)]
            parts += [item(value, n - after) for n in range(after)]
        else:
            raise Unreadable("a starred target")
        for target, part in zip([*targets[:star], inner.value, *targets[star + 1 :]], parts, strict=True):
            self.assign(target, part, frame)
