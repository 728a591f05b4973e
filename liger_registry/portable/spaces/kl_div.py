"""``kl_div`` in PyTorch: what each implementation can do, and which configs it has."""

from __future__ import annotations

from liger_registry.portable.spaces._divergences import implementations

IMPLEMENTATIONS = implementations("kl_div")
