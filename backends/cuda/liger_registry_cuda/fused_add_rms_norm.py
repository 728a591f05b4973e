"""``fused_add_rms_norm`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry_cuda._norms import implementations

IMPLEMENTATIONS = implementations("fused_add_rms_norm")
