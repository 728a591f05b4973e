"""``geglu`` in PyTorch: what each implementation can do."""

from __future__ import annotations

from liger_registry.portable.spaces._gated import implementations

IMPLEMENTATIONS = implementations("geglu")
