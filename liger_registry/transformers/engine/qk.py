"""The norms of queries and keys and the rotation behind them in one launch, in attentions whose code allows it.

    query_states = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key_states = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

or with ``self.q_norm(query_states)`` after the transposition.

The forward is built again with the norms moved to the rotation. Statements between them may neither read the two nor
write to any tensor, so that the values are the same wherever they are computed. Where one of the norms is no longer a
plain ``rms_norm`` at the moment of the call, or ``qk_norm_rope`` does not take it, norms and rotation are calls of
their own.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_registry.transformers.engine import rotary
from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.calls import call
from liger_registry.transformers.engine.fusing import (
    attribute_of_self,
    definition,
    norm_of,
    only_argument,
    single_name,
    why_not,
)
from liger_registry.transformers.engine.norms import NormForward
from liger_registry.transformers.engine.rebuild import Shared, rebuild
from liger_registry.transformers.engine.rebuilt import Rebuilt, rebound
from liger_registry.transformers.engine.report import Row
from liger_registry.transformers.engine.rotations import Pairs
from liger_registry.transformers.engine.turning import Ready, Turned, before

OP = "qk_norm_rope"
_FUSED = "_liger_norm_and_turn"

Tensor = torch.Tensor


class Normed(NamedTuple):
    """A statement that normalises heads.

    Attributes:
        place: among the statements of its block.
        norm: the attribute of the module.
        heads: what is normalised.
        flipped: whether the result is then transposed.
    """

    place: int
    norm: str
    heads: ast.expr
    flipped: bool


class Site(NamedTuple):
    """A block of statements, the rotation in it, its function's name, and the norms of what is turned."""

    block: list[ast.stmt]
    place: int
    function: str
    q: Normed
    k: Normed


_names: weakref.WeakKeyDictionary[type, tuple[tuple[str, str, str], ...]] = weakref.WeakKeyDictionary()
_rebuilt: Shared[Callable[..., Any]] = Shared()


class NormedRotaryForward(Rebuilt):
    """An attention's forward with q/k norms and rotation in one."""

    def _find(self) -> Callable[..., Any]:
        kind = type(self.module)
        function: Callable[..., Any] = kind.forward
        turned = _turned(kind)
        if not turned or not norms(kind):
            return function
        names = {**turned, _FUSED: norm_and_turn}
        return _rebuilt.get_or_make(function, OP, lambda: rebuild(function, names, lambda tree: edit(tree, turned)))


def find(model: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    """The attentions of a model whose forward allows it."""
    if not enabled.get(OP, True) or not enabled.get(rotary.OP, True):
        return
    for path, module in model.named_modules():
        if norms(type(module)):
            yield from _look(path, module)


def _look(path: str, module: nn.Module) -> Iterator[Binding | Row]:
    kind = type(module).__name__
    found = norms(type(module))
    pairs = [(getattr(module, q, None), getattr(module, k, None)) for _, q, k in found]
    if not any(norm_of(q) is not None and norm_of(k) is not None for q, k in pairs):
        named = [(name, getattr(module, name, None)) for _, *two in found for name in two]
        reasons = [why_not(norm, name) for name, norm in named if norm_of(norm) is None]
        yield Row(OP, path, False, "; ".join(dict.fromkeys(reasons)), kind)
        return
    use = next(use for use in rotary.uses(type(module)) if use.method == "forward")
    what = rotary.unreached(module, use)
    if what is None:
        return
    if what:
        yield Row(OP, path, False, what, kind)
        return
    function, q, k = found[0]
    made = rebound(OP, path, NormedRotaryForward, module, "forward", f"its forward calls {q} and {k}, then {function}")
    yield made
    if isinstance(made, Binding):
        yield Row(rotary.OP, path, True, f"in {OP}, or alone where that does not take a call", kind)


def norm_and_turn(
    q_norm: nn.Module,
    k_norm: nn.Module,
    function: Turned,
    flipped: bool,
    q: Tensor,
    k: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:  # noqa: ANN401
    """``function(q_norm(q), k_norm(k), ...)``; with ``flipped``, of what the norms give transposed."""
    forwards = norm_of(q_norm), norm_of(k_norm)
    if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4:
        heads = (q.transpose(1, 2), k.transpose(1, 2)) if flipped else (q, k)
        turned = _fused(*forwards, function, function.ready((*heads, *args), kwargs))
        if turned is not None:
            return turned
    q, k = q_norm(q), k_norm(k)
    if flipped:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return function(q, k, *args, **kwargs)


def _fused(
    q_forward: NormForward | None, k_forward: NormForward | None, function: Turned, ready: Ready | None
) -> tuple[Tensor, Tensor] | None:
    """Both in one launch; None if it is no case for ``qk_norm_rope``."""
    if q_forward is None or k_forward is None or ready is None or ready.k is None or ready.wide:
        return None
    pairs = function.rotation.pairs
    weights = q_forward.weight, k_forward.weight
    options = _options(ready, q_forward, k_forward, weights) if _simple(pairs) else None
    if options is None:
        return None
    q_out, k_out = call(OP, ready.q, ready.k, *weights, ready.cos, ready.sin, interleaved=pairs.interleaved, **options)
    return before(q_out, ready), before(k_out, ready)


def _simple(pairs: Pairs) -> bool:
    """Whether ``qk_norm_rope`` has these pairs: halves or neighbours by whole tables."""
    return pairs in (Pairs(), Pairs(partial=True), Pairs(interleaved=True), Pairs(interleaved=True, partial=True))


def _options(
    ready: Ready, q_forward: NormForward, k_forward: NormForward, weights: tuple[Tensor | None, Tensor | None]
) -> dict[str, Any] | None:
    """The options of both norms, where they are the same and give heads of the dtype they are given."""
    q_weight, k_weight = weights
    if q_weight is None or k_weight is None or q_weight.dtype != k_weight.dtype:
        return None
    options = q_forward.options(ready.q, q_weight)
    if options is None or options != k_forward.options(ready.k, k_weight):
        return None
    dtype = ready.q.dtype
    if options["casting"] == "llama" and torch.promote_types(dtype, q_weight.dtype) != dtype:
        return None
    return options


# -- the code --------------------------------------------------------------------------------------------------------


def _turned(kind: type) -> dict[str, Turned]:
    return next((use.functions for use in rotary.uses(kind) if use.method == "forward"), {})


def norms(kind: type) -> tuple[tuple[str, str, str], ...]:
    """For each place in a class's forward where it can be done the rotary function and the norms of q and k."""
    found = _names.get(kind)
    if found is None:
        turned = _turned(kind)
        tree = definition(getattr(kind, "forward", None)) if turned else None
        sites = [] if tree is None else list(_sites(tree, turned))
        found = _names[kind] = tuple((site.function, site.q.norm, site.k.norm) for site in sites)
    return found


def edit(tree: ast.FunctionDef, turned: dict[str, Turned]) -> None:
    """Move the norms to the rotation, in a definition in which that is possible."""
    owner = tree.args.args[0].arg
    for block, place, function, q, k in list(_sites(tree, turned)):
        for normed in (q, k):
            statement = block[normed.place]
            assert isinstance(statement, ast.Assign)
            statement.value = normed.heads
        statement = block[place]
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        of_self = [ast.Attribute(ast.Name(owner, ast.Load()), normed.norm, ast.Load()) for normed in (q, k)]
        first: list[ast.expr] = [*of_self, ast.Name(function, ast.Load()), ast.Constant(q.flipped)]
        statement.value.args[:0] = first
        statement.value.func = ast.copy_location(ast.Name(_FUSED, ast.Load()), statement.value.func)


def _sites(tree: ast.FunctionDef, turned: dict[str, Turned]) -> Iterator[Site]:
    owner = tree.args.args[0].arg if tree.args.args else ""
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            for place, statement in enumerate(block):
                call = _rotation(statement, turned)
                if call is None:
                    continue
                names = [argument.id for argument in call.args[:2] if isinstance(argument, ast.Name)]
                found = [_normed(block, place, name, owner) for name in names]
                q, k = found if len(found) == 2 else (None, None)
                if q is not None and k is not None and names[0] != names[1] and q.flipped == k.flipped:
                    assert isinstance(call.func, ast.Name)
                    yield Site(block, place, call.func.id, q, k)


def _rotation(statement: ast.stmt, turned: dict[str, Turned]) -> ast.Call | None:
    """The call in ``q, k = apply_rotary_pos_emb(q, k, cos, sin)``."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    if not isinstance(call.func, ast.Name) or call.func.id not in turned or len(call.args) < 2:
        return None
    function = turned[call.func.id]
    heads = function.rotation.roles.heads
    if len(heads) != 2 or function.rotation.roles.names[:2] != heads or not _simple(function.rotation.pairs):
        return None
    return call


def _normed(block: list[ast.stmt], place: int, name: str, owner: str) -> Normed | None:
    """The statement that normalises what is called so, where nothing between it and the rotation can tell."""
    for n in range(place - 1, -1, -1):
        statement = block[n]
        if single_name(statement) == name:
            return _as_norm(n, statement, owner)
        if not _harmless(statement) or any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(statement)):
            return None
    return None


def _as_norm(place: int, statement: ast.stmt, owner: str) -> Normed | None:
    assert isinstance(statement, ast.Assign)
    value, flipped = statement.value, False
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "transpose":
        dims = [a.value for a in value.args if isinstance(a, ast.Constant)]
        if dims != [1, 2] or len(value.args) != 2 or value.keywords:
            return None
        value, flipped = value.func.value, True
    heads = only_argument(value)
    norm = attribute_of_self(value.func, owner) if isinstance(value, ast.Call) else None
    return None if norm is None or heads is None else Normed(place, norm, heads, flipped)


def _harmless(statement: ast.stmt) -> bool:
    """Whether a statement only sets variables to values, and writes to no tensor."""
    if not isinstance(statement, ast.Assign):
        return False
    for target in statement.targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(part, ast.Name) for part in parts):
            return False
    for node in ast.walk(statement.value):
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
            return False
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr.endswith("_") and not called.attr.endswith("__"):
            return False
    return True
