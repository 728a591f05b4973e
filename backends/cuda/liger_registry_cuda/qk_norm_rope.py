"""``qk_norm_rope`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry_cuda._rotary import implementations

IMPLEMENTATIONS = implementations("qk_norm_rope")
