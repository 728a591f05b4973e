"""Gated MLPs, and activations that are operations of their own.

In a gated MLP ``act(gate) * up`` is found in the code of its forward, where both come from linear maps (``products``),
and the activation is judged by what it computes (``activations``). Layers are called as they were, so that their hooks,
adapters and quantised weights work. A squared ReLU is replaced in its own module, whatever calls it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from liger_registry.transformers.engine.activations import activation_of
from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.calls import FLOATING, call, reference, takes, usable_place
from liger_registry.transformers.engine.gating import GatedForward, GatedProduct, bind_products
from liger_registry.transformers.engine.probe import CannotStandIn, confirm, difference, differs_in, inputs, stand_in
from liger_registry.transformers.engine.reading import Unreadable
from liger_registry.transformers.engine.rebuild import Shared
from liger_registry.transformers.engine.report import Row

Tensor = torch.Tensor


class SquaredForward:
    """A squared ReLU's forward through its operation.

    Args:
        module: the activation.
        operate: calls an operation by name.
    """

    def __init__(self, module: nn.Module, operate: Any = call) -> None:  # noqa: ANN401
        self.module, self.operate = module, operate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The forward."""
        if len(args) == 1 and not kwargs:
            (x,) = args
            if takes(x) and x.dtype in FLOATING and x.dim() > 0 and x.shape[-1] > 0:
                return self.operate("relu_squared", x)
        return type(self.module).forward(self.module, *args, **kwargs)


def find(model: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    """The gated MLPs and squared ReLUs of a model."""
    for path, module in model.named_modules():
        if not any(True for _ in module.children()) and not any(True for _ in module.parameters(recurse=False)):
            yield from _squared(path, module, enabled)
        if not is_experts(module) and not _recurrent(module):
            yield from bind_products(path, module, "forward", enabled, confirmed)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of several experts in single tensors; ``experts`` looks after those."""
    return callable(getattr(type(module), "_apply_gate", None)) or any(
        parameter.dim() == 3 for parameter in module.parameters(recurse=False)
    )


def _recurrent(module: nn.Module) -> bool:
    """Whether it is a mixer of tokens, with a convolution and a state, whose products with a gate are no MLP's."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def _squared(path: str, module: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    if not enabled.get("relu_squared"):
        return
    try:
        if activation_of(module).op != "relu_squared":
            return
    except Unreadable:
        return
    where, reason = usable_place(module)
    reason = reason or confirm(module, lambda made: SquaredForward(made, reference), lambda made: (3, 41), FLOATING[:2])
    if reason:
        yield Row("relu_squared", path, False, reason, type(module).__name__)
    else:
        yield Binding("relu_squared", path, module, where, SquaredForward(module), "relu(x) ** 2")


_probed: Shared[str] = Shared()


def confirmed(module: nn.Module, method: str, product: GatedProduct) -> str:
    """Whether a rebuilt method does on random numbers what the method does; asked once for each class."""
    layers = tuple((name, type(child)) for name, child in module.named_children())
    function = weakref.ref(getattr(type(module), method))
    key = (function, product.op, tuple(product.options.items()), product.kind, layers)

    def probe() -> str:
        plain = copy.copy(product)
        plain.operate = reference
        return _compared(module, method, plain)

    return _probed.get_or_make(type(module), key, probe)


def _compared(module: nn.Module, method: str, product: GatedProduct) -> str:
    for dtype in FLOATING[:2]:
        try:
            made = stand_in(module, dtype)
        except CannotStandIn:
            return _alone(module, product)
        own = getattr(type(made), method).__get__(made)
        width = _width(made, own, dtype)
        if width is None:
            return _alone(module, product)
        parameters = [p for p in made.parameters() if p.requires_grad]
        text = difference(own, GatedForward(made, method, product), inputs((2, 3, width), dtype), parameters)
        if text:
            return differs_in(dtype, text)
    return ""


def _width(made: nn.Module, own: Any, dtype: torch.dtype) -> int | None:  # noqa: ANN401
    """A width that a method of one tensor takes; None if it takes others as well."""
    sizes = {size for parameter in made.parameters() for size in parameter.shape if size > 1}
    for width in [*sorted(sizes, reverse=True), 48]:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                if isinstance(own(torch.ones(2, 3, width, dtype=dtype)), Tensor):
                    return width
        except Exception:
            continue
    return None


def _alone(module: nn.Module, product: GatedProduct) -> str:
    """Where a method cannot be called here, the product by itself is compared."""
    act = next((child for child in module.modules() if type(child) is product.kind), product.kind)
    if isinstance(act, tuple):
        function, args, keywords = act
        act = functools.partial(function, *args, **dict(keywords))
    for dtype in FLOATING[:2]:
        try:
            text = difference(
                lambda gate, up: act(gate) * up,
                lambda gate, up: product(act, gate=gate, up=up),
                inputs((5, 41), dtype, 2),
            )
        except Exception as error:
            return f"a probe on random numbers fails: {type(error).__name__}: {error}"
        if text:
            return differs_in(dtype, text)
    return ""
