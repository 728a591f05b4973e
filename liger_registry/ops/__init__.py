"""The contracts of the operations, one file each; registered through the entry point like everybody's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_registry.catalog import Staging

LIGER_REGISTRY_API = (1, 0)


def register(registry: Staging) -> None:
    """Register the contracts of this distribution."""
    from liger_registry.ops import rms_norm

    registry.register(rms_norm.OP)
