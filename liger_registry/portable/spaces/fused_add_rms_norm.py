"""``fused_add_rms_norm`` in PyTorch: what ``rms_norm`` has, which its implementations call after the addition."""

from __future__ import annotations

from dataclasses import replace

from liger_registry.portable.spaces.rms_norm import IMPLEMENTATIONS as NORMS

_NAME = "fused_add_rms_norm"

IMPLEMENTATIONS = tuple(
    replace(
        norm,
        op=_NAME,
        launch=f"liger_registry.portable.{_NAME}:{norm.phase}_{norm.name}",
        doc=f"a sum, and {norm.doc}",
    )
    for norm in NORMS
)
