"""The PyTorch implementations: every operation on every device, float64 included, with nothing but torch.

They are registered through the entry point like everybody's, and compete with the Triton kernels wherever both can run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_registry.catalog import Staging

LIGER_REGISTRY_API = (1, 0)


def register(registry: Staging) -> None:
    """Register the PyTorch implementations; imports no torch."""
    from liger_registry.portable import spaces

    for implementation in spaces.IMPLEMENTATIONS:
        registry.register(implementation)
