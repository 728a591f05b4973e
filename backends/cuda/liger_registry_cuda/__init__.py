"""Triton implementations for NVIDIA GPUs: what they can do, their config spaces, and Hopper-only kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_registry.catalog import Staging

LIGER_REGISTRY_API = (1, 0)


def register(registry: Staging) -> None:
    """Register the implementations; imports neither Triton nor torch."""
    from liger_registry_cuda import rms_norm

    for op in (rms_norm,):
        for implementation in op.IMPLEMENTATIONS:
            registry.register(implementation)
