"""Experts whose weights are packed into single tensors: the gate between their two products.

Two places compute it: the class's own loop over experts, and ``_apply_gate``, which the grouped implementations of
transformers call on the module. Both are looked at like an MLP's forward, and each is bound where it is one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.gating import bind_products
from liger_registry.transformers.engine.mlps import confirmed, is_experts
from liger_registry.transformers.engine.report import Row

_GATE = "_apply_gate"


def find(model: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    """The packed experts of a model."""
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        found: list[Binding | Row] = []
        for method in ("forward", _GATE):
            if callable(getattr(type(module), method, None)):
                found += bind_products(path, module, method, enabled, confirmed)
        if not found and hasattr(type(module), _GATE) and enabled.get("swiglu") and getattr(module, "has_gate", True):
            reason = "its gate is no product with SiLU or GELU"
            yield Row("swiglu", path, False, reason, type(module).__name__)
        yield from found
