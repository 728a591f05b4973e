"""``rope`` on AMD GPUs."""

from __future__ import annotations

from liger_registry_rocm._rotary import implementations

IMPLEMENTATIONS = implementations("rope")
