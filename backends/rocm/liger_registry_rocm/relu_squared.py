"""``relu_squared`` on AMD GPUs."""

from __future__ import annotations

from liger_registry_rocm._gated import implementations

IMPLEMENTATIONS = implementations("relu_squared")
