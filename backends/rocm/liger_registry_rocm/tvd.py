"""``tvd`` on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from liger_registry_rocm._divergences import implementations

IMPLEMENTATIONS = implementations("tvd")
