"""``swiglu`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry_cuda._gated import implementations

IMPLEMENTATIONS = implementations("swiglu")
