"""``cross_entropy`` on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from liger_registry.kernels.logits_heuristics import loss_bytes
from liger_registry_rocm._logits import implementations

IMPLEMENTATIONS = implementations("cross_entropy", loss_bytes)
