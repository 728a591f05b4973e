"""``layer_norm`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry_cuda._norms import implementations

IMPLEMENTATIONS = implementations("layer_norm")
