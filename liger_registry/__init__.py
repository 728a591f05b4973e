"""Kernels for LLM training that are chosen by measurement: ``registry.get("rms_norm")`` gives the fastest verified one.

Names load on first access (PEP 562): importing this package imports neither torch nor Triton nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from liger_registry._version import __version__

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog as Catalog
    from liger_registry.config import Config as Config
    from liger_registry.config import ConfigSpace as ConfigSpace
    from liger_registry.decision import Decision as Decision
    from liger_registry.device import Device as Device
    from liger_registry.implementation import Capability as Capability
    from liger_registry.implementation import Implementation as Implementation
    from liger_registry.op import Op as Op
    from liger_registry.plan import Plan as Plan
    from liger_registry.problem import Problem as Problem
    from liger_registry.runtime import Registry as Registry
    from liger_registry.runtime import registry as registry

_HOME = {
    "Capability": "implementation",
    "Catalog": "catalog",
    "Config": "config",
    "ConfigSpace": "config",
    "Decision": "decision",
    "Device": "device",
    "Implementation": "implementation",
    "Op": "op",
    "Plan": "plan",
    "Problem": "problem",
    "Registry": "runtime",
    "registry": "runtime",
}
__all__ = [*_HOME, "__version__", "get"]


def get(op: str, **options: Any) -> Any:  # noqa: ANN401 - a Handle; see Registry.get
    """Short for ``registry.get``."""
    from liger_registry.runtime import registry as public

    return public.get(op, **options)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
