"""Residual additions and the norms behind them in one launch, in layers whose code shows that nothing is between.

    hidden_states = residual + hidden_states                hidden_states = residual + hidden_states
    residual = hidden_states                         or     normed = self.norm(hidden_states)
    hidden_states = self.norm(hidden_states)

The forward is built again with the sum and the call in one; statements between them may only give the sum other names.
The sum is rounded before it is normalised, as it is when it is stored. Where the norm is no longer a plain ``rms_norm``
at the moment of the call (hooks, a replaced forward, other dtypes), the sum and the norm are computed one by one.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.calls import call, takes
from liger_registry.transformers.engine.fusing import (
    attribute_of_self,
    definition,
    norm_of,
    only_argument,
    single_name,
    straight,
    why_not,
)
from liger_registry.transformers.engine.rebuild import Shared, rebuild
from liger_registry.transformers.engine.rebuilt import Rebuilt, rebound
from liger_registry.transformers.engine.report import Row

OP = "fused_add_rms_norm"
_ADD_NORM, _NORMED = "_liger_add_norm", "_liger_normed"

Tensor = torch.Tensor


class Site(NamedTuple):
    """Places of the sum and of the norm in a forward, and the norm's attribute."""

    sum: int
    norm: int
    name: str


_sites: weakref.WeakKeyDictionary[type, tuple[Site, ...]] = weakref.WeakKeyDictionary()
_rebuilt: Shared[Callable[..., Any]] = Shared()


class ResidualForward(Rebuilt):
    """A decoder layer's forward with additions and norms in one."""

    def _find(self) -> Callable[..., Any]:
        kind = type(self.module)
        function: Callable[..., Any] = kind.forward
        if not sites(kind):
            return function
        return _rebuilt.get_or_make(function, OP, lambda: rebuild(function, {_ADD_NORM: add_norm}, edit))


def find(model: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    """The decoder layers of a model whose forward allows it."""
    if not enabled.get(OP, True):
        return
    for path, module in model.named_modules():
        if sites(type(module)):
            yield from _look(path, module)


def _look(path: str, module: nn.Module) -> Iterator[Binding | Row]:
    kind = type(module).__name__
    names = [site.name for site in sites(type(module))]
    norms = {name: getattr(module, name, None) for name in names}
    fused = [name for name, norm in norms.items() if norm_of(norm) is not None]
    if not fused:
        if any(isinstance(norm, nn.Module) and "rms" in type(norm).__name__.lower() for norm in norms.values()):
            yield Row(OP, path, False, "; ".join(why_not(norm, name) for name, norm in norms.items()), kind)
        return
    how = f"its forward adds, then calls {' and '.join(fused)}"
    yield rebound(OP, path, ResidualForward, module, "forward", how)


def add_norm(norm: nn.Module, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """``(norm(one + other), one + other)``."""
    forward = norm_of(norm)
    if forward is not None and takes(one, other) and one.shape == other.shape and one.dtype == other.dtype:
        options = forward.options(one, forward.weight) if one.device == other.device else None
        if options is not None:
            normed, total = call(OP, other, one, forward.weight, **options)
            return normed, total
    total = one + other
    return norm(total), total


def sites(kind: type) -> tuple[Site, ...]:
    """Where a class's forward adds and then normalises."""
    found = _sites.get(kind)
    if found is None:
        tree = None if kind.__module__.startswith("torch.") else definition(getattr(kind, "forward", None))
        found = _sites[kind] = () if tree is None else tuple(_search(tree))
    return found


def _search(tree: ast.FunctionDef) -> Iterator[Site]:
    owner = tree.args.args[0].arg if tree.args.args else ""
    places = dict(straight(tree.body))
    for n, statement in places.items():
        target = single_name(statement)
        if target is None or not isinstance(statement, ast.Assign) or not _is_sum(statement.value):
            continue
        same = {target}
        for m in range(n + 1, len(places)):
            following = places[m]
            name = single_name(following)
            value = following.value if isinstance(following, ast.Assign) else None
            if name is None or value is None:
                break
            if isinstance(value, ast.Name) and value.id in same:
                same.add(name)
                continue
            argument = only_argument(value)
            norm = attribute_of_self(value.func, owner) if isinstance(value, ast.Call) else None
            if norm is not None and "norm" in norm.lower() and isinstance(argument, ast.Name) and argument.id in same:
                yield Site(n, m, norm)
            break


def _is_sum(value: ast.expr) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)


def edit(tree: ast.FunctionDef) -> None:
    """Put sums and norms together, in a definition of which ``sites`` were found."""
    owner = tree.args.args[0].arg
    for site in _search(tree):
        add, norm = tree.body[site.sum], tree.body[site.norm]
        assert isinstance(add, ast.Assign)
        assert isinstance(add.value, ast.BinOp)
        assert isinstance(norm, ast.Assign)
        (target,) = add.targets
        function = ast.Attribute(ast.Name(owner, ast.Load()), site.name, ast.Load())
        both = ast.Call(ast.Name(_ADD_NORM, ast.Load()), [function, add.value.left, add.value.right], [])
        pair = ast.Tuple([ast.Name(_NORMED, ast.Store()), target], ast.Store())
        tree.body[site.sum] = ast.copy_location(ast.Assign([pair], both), add)
        tree.body[site.norm] = ast.copy_location(ast.Assign(norm.targets, ast.Name(_NORMED, ast.Load())), norm)
