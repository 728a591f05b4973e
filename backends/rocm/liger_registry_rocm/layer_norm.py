"""``layer_norm`` on AMD GPUs."""

from __future__ import annotations

from liger_registry_rocm._norms import implementations

IMPLEMENTATIONS = implementations("layer_norm")
