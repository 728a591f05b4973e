"""``kl_div`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry_cuda._divergences import implementations

IMPLEMENTATIONS = implementations("kl_div")
