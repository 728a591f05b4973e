"""``fused_add_rms_norm`` on AMD GPUs."""

from __future__ import annotations

from liger_registry_rocm._norms import implementations

IMPLEMENTATIONS = implementations("fused_add_rms_norm")
