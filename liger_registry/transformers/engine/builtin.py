"""The adapters of this distribution, registered through the same entry point as anybody's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from torch import nn

from liger_registry.transformers.engine.adapters import Adapter, Adapters, Enabled, Finder
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.report import Row

LIGER_REGISTRY_API = (1, 0)


def register(adapters: Adapters) -> None:
    """Register them; each imports its code when it is first asked."""
    adapters.register(Adapter("norms", ("rms_norm", "layer_norm"), _of("norms")))
    adapters.register(Adapter("mlps", ("swiglu", "geglu", "relu_squared"), _of("mlps")))
    adapters.register(Adapter("experts", ("swiglu", "geglu"), _of("experts")))
    # Before the rotary embedding alone, and both behind the norms that they take up.
    adapters.register(Adapter("qk", ("qk_norm_rope",), _of("qk")))
    adapters.register(Adapter("rotary", ("rope",), _of("rotary")))
    adapters.register(Adapter("residual", ("fused_add_rms_norm",), _of("residual")))
    adapters.register(Adapter("head", ("fused_linear_cross_entropy", "cross_entropy"), _of("head")))


def _of(module: str) -> Finder:
    """The ``find`` of a module beside this one, imported on first use."""

    def find(model: nn.Module, enabled: Enabled) -> Iterable[Binding | Row]:
        found: Iterable[Binding | Row] = importlib.import_module(f"{__package__}.{module}").find(model, enabled)
        return found

    return find
