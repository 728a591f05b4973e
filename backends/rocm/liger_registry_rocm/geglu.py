"""``geglu`` on AMD GPUs."""

from __future__ import annotations

from liger_registry_rocm._gated import implementations

IMPLEMENTATIONS = implementations("geglu")
