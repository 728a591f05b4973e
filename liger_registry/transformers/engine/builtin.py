"""The adapters of this distribution, registered through the same entry point as anybody's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable

from torch import nn

from liger_registry.transformers.engine.adapters import Adapter, Adapters, Enabled, Finder
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.report import Row

LIGER_REGISTRY_API = (1, 0)


_FINDERS = {
    "norms": ("rms_norm", "layer_norm"),
    "mlps": ("swiglu", "geglu", "relu_squared"),
    "experts": ("swiglu", "geglu"),
    "rotary": ("rope",),
    "residual": ("fused_add_rms_norm",),
    "head": ("fused_linear_cross_entropy", "cross_entropy"),
}


def register(adapters: Adapters) -> None:
    """Register those that this version has; each imports its code when it is first asked."""
    for name, ops in _FINDERS.items():
        if importlib.util.find_spec(f"{__package__}.{name}") is not None:
            adapters.register(Adapter(name, ops, _of(name)))


def _of(module: str) -> Finder:
    """The ``find`` of a module beside this one, imported on first use."""

    def find(model: nn.Module, enabled: Enabled) -> Iterable[Binding | Row]:
        found: Iterable[Binding | Row] = importlib.import_module(f"{__package__}.{module}").find(model, enabled)
        return found

    return find
