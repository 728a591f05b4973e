"""Replacements for code with gated products, ``act(gate) * up``: the same code, with the operation in their place."""

from __future__ import annotations

import ast
import dis
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from liger_registry.transformers.engine.activations import Activation, activation_of
from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.calls import FLOATING, call, hooked, takes, usable_place
from liger_registry.transformers.engine.evaluating import Frame
from liger_registry.transformers.engine.interpreting import Interpreter
from liger_registry.transformers.engine.products import NAME, Product, products, projected, rewrite
from liger_registry.transformers.engine.reading import Unreadable
from liger_registry.transformers.engine.rebuild import CannotRebuild, Shared, chain, rebuild, syntax
from liger_registry.transformers.engine.report import Row
from liger_registry.transformers.engine.values import Known

Tensor = torch.Tensor

_MAPS = frozenset(("linear", "bmm", "matmul", "mm", "einsum", "grouped_mm", "baddbmm"))


def kind_of(act: Any) -> Any:  # noqa: ANN401
    """What tells an activation from others, in copies too: a module's class, a function, a partial one's parts."""
    if isinstance(act, nn.Module):
        return type(act)
    if isinstance(act, functools.partial):
        return act.func, act.args, tuple(sorted(act.keywords.items()))
    return act


class GatedProduct:
    """``act(gate) * up`` through an operation, or as it stands where that does not take the tensors.

    Args:
        activation: what the activation computes.
        kind: of the activation, as ``kind_of`` has it.
        operate: calls an operation by name.
    """

    def __init__(self, activation: Activation, kind: Any, operate: Callable[..., Any] = call) -> None:  # noqa: ANN401
        self.op, self.options, self.kind = activation.op, dict(activation.options), kind
        self.operate = operate

    def __call__(
        self, act: Callable[[Tensor], Tensor], *, gate: Tensor, up: Tensor | None, gate_multiplier: float = 1.0
    ) -> Tensor:
        """The product; without ``up`` gate is both, side by side in the last dimension."""
        scaled = gate_multiplier != 1.0
        if (not scaled or self.op == "swiglu") and self.expected(act) and self.fits(gate, up):
            options = {**self.options, "gate_multiplier": gate_multiplier} if scaled else self.options
            result: Tensor = self.operate(self.op, gate, up, **options)
            return result
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        return act(gate * gate_multiplier if scaled else gate) * up

    def expected(self, act: Any) -> bool:  # noqa: ANN401
        """Whether an activation is the one that was looked at, and nobody watches its calls."""
        if isinstance(act, nn.Module):
            return type(act) is self.kind and not hooked(act) and "forward" not in act.__dict__
        return bool(kind_of(act) == self.kind)

    def fits(self, gate: Tensor, up: Tensor | None) -> bool:
        """Whether the operation takes these tensors."""
        if up is None:
            fits = takes(gate) and gate.dim() > 0 and gate.shape[-1] > 0 and gate.shape[-1] % 2 == 0
            return fits and gate.dtype in FLOATING
        if not takes(gate, up) or gate.shape != up.shape or gate.device != up.device or gate.dim() == 0:
            return False
        return gate.dtype in FLOATING and up.dtype in FLOATING and gate.shape[-1] > 0


class GatedForward:
    """A method with its gated products through an operation.

    Args:
        module: the module it is bound to.
        method: its name.
        product: what takes the place of the products.
    """

    def __init__(self, module: nn.Module, method: str, product: GatedProduct) -> None:
        self.module, self.method, self.product = module, method, product
        self.function: Callable[..., Any] | None = rebuilt(module, method, product)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The method."""
        if self.function is None:
            self.function = rebuilt(self.module, self.method, self.product)
        return self.function(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}  # made of code, which does not pickle


@dataclass
class Found:
    """The gated products of one method of one module.

    Attributes:
        products: those that the operation computes.
        activation: the one that they have; None if there are none.
        kind: of it, as ``kind_of`` has it.
        module: it, if it is a module.
        reason: why the activation of another product is none of those looked for.
    """

    products: list[Product] = field(default_factory=list)
    activation: Activation | None = None
    kind: Any = None
    module: nn.Module | None = None
    reason: str = ""


def look(module: nn.Module, function: FunctionType, tree: ast.FunctionDef, bare: bool) -> Found:
    """The gated products in a function's syntax, on this instance.

    Args:
        module: the instance.
        function: the innermost one of a method.
        tree: its syntax.
        bare: whether products of what the function is given count too, and not those of linear maps in it alone.

    Raises:
        Unreadable: products with different activations.
    """
    found = Found()
    known: dict[str, Activation | str] = {}

    def judged(expr: ast.expr) -> Activation | str:
        text = ast.unparse(expr)
        if text not in known:
            known[text] = _judged(module, function, expr)
        return known[text]

    def projects(node: ast.expr) -> bool:
        return _projects(module, function, node)

    def is_number(expr: ast.expr) -> bool:
        return _is_number(module, function, expr)

    for product in products(tree, lambda expr: judged(expr) != "", is_number):
        if bare or all(projected(tree, side, projects) for side in (product.gate, product.up)):
            activation = judged(product.act)
            if isinstance(activation, str):
                found.reason = activation
            else:
                found.products.append(product)
                found.activation = activation
    activations = {ast.unparse(product.act) for product in found.products}
    if len(activations) > 1:
        raise Unreadable(f"it has several gates: {', '.join(sorted(activations))}")
    if found.products:
        target = _object(module, function, found.products[0].act)
        found.kind = kind_of(target)
        found.module = target if isinstance(target, nn.Module) else None
    return found


def _judged(module: nn.Module, function: FunctionType, expr: ast.expr) -> Activation | str:
    """The activation that an expression is, why one is none of those looked for, or "" for anything else."""
    try:
        target = _object(module, function, expr)
    except Unreadable:
        return ""
    try:
        activation = activation_of(target)
    except Unreadable as error:
        named = any(name in type(target).__name__.lower() for name in ("gelu", "silu", "swish"))
        return error.reason if isinstance(target, nn.Module) and named else ""
    return activation if activation.op != "relu_squared" else ""


def _object(module: nn.Module, function: FunctionType, expr: ast.expr) -> Any:  # noqa: ANN401
    """What an expression is that is made of names known before the call.

    Raises:
        Unreadable: it is not.
    """
    own = function.__code__.co_varnames
    for node in ast.walk(expr):
        if isinstance(node, ast.Name) and node.id in own and node.id != own[0]:
            raise Unreadable(f"{node.id} is known in the call alone")
    value = Interpreter(module).value(expr, Frame(function, {own[0]: Known(module)}, Known(module)))
    if not isinstance(value, Known):
        raise Unreadable(f"{ast.unparse(expr)} is a tensor")
    return value.value


def _is_number(module: nn.Module, function: FunctionType, expr: ast.expr) -> bool:
    """Whether an expression is a number of the module, as ``self.gate_multiplier`` is."""
    try:
        value = _object(module, function, expr) if isinstance(expr, ast.Attribute) else None
    except Unreadable:
        return False
    return isinstance(value, float)


def _projects(module: nn.Module, function: FunctionType, node: ast.expr) -> bool:
    """Whether a node of syntax is a linear map: a layer's call, or a product of matrices."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in _MAPS:
        return True
    layer = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    try:
        target = _object(module, function, layer)
    except Unreadable:
        return False
    return isinstance(target, nn.Module) and any(True for _ in target.parameters())


def _bare(module: nn.Module, method: str) -> bool:
    """Whether a method works on what it is given: a gate alone, apart from the layers before it."""
    return method != "forward" or not any(True for _ in module.parameters())


_rebuilt: Shared[Callable[..., Any]] = Shared()


def rebuilt(module: nn.Module, method: str, product: GatedProduct) -> Callable[..., Any]:
    """A method's function with the product in place of its gated products; one for all alike."""
    function = getattr(type(module), method)
    inner = chain(function)[-1]
    key = (product.op, tuple(sorted(product.options.items())), product.kind, product.operate)
    bare = _bare(module, method)

    def edit(tree: ast.FunctionDef) -> None:
        rewrite(tree, look(module, inner, tree, bare).products)

    return _rebuilt.get_or_make(function, key, lambda: rebuild(function, {NAME: product}, edit))


def bind_products(
    path: str,
    module: nn.Module,
    method: str,
    enabled: Enabled,
    confirmed: Callable[[nn.Module, str, GatedProduct], str],
) -> Iterator[Binding | Row]:
    """The binding for a method with gated products, or why there is none; nothing for a method of another kind.

    Args:
        path: of the module.
        module: the module.
        method: the name of the method.
        enabled: the operations that are wanted.
        confirmed: probes a replacement; says what is wrong with it, or "".
    """
    kind = type(module).__name__
    try:
        function = chain(getattr(type(module), method))[-1]
        if not _multiplies(function):
            return
        found = look(module, function, syntax(function), _bare(module, method))
    except CannotRebuild:
        return
    except Unreadable as error:
        yield Row("swiglu", path, False, error.reason, kind)
        return
    if found.activation is None:
        op = "geglu" if "gelu" in found.reason.lower() else "swiglu"
        if found.reason and enabled.get(op):
            yield Row(op, path, False, found.reason, kind)
        return
    op = found.activation.op
    if not enabled.get(op):
        return
    where, reason = usable_place(module, method)
    if not reason and found.module is not None and (hooked(found.module) or usable_place(found.module)[1]):
        reason = "its activation has hooks, or a forward of its own"
    if not reason:
        product = GatedProduct(found.activation, found.kind)
        try:
            reason = confirmed(module, method, product)
            if not reason:
                how = f"{found.activation.text}(gate) * up{' of one tensor' if found.products[0].packed else ''}"
                yield Binding(op, path, module, where, GatedForward(module, method, product), f"{how} in {method}")
                return
        except CannotRebuild as error:
            reason = error.reason
    yield Row(op, path, False, reason, kind)


_mults: weakref.WeakKeyDictionary[CodeType, bool] = weakref.WeakKeyDictionary()


def _multiplies(function: FunctionType) -> bool:
    """Whether there is any product in a function, by its instructions; most modules are done with here."""
    code = function.__code__
    if code not in _mults:
        _mults[code] = any(
            step.opname == "BINARY_MULTIPLY" or (step.opname == "BINARY_OP" and step.argrepr == "*")
            for step in dis.get_instructions(code)
        )
    return _mults[code]
