"""``cross_entropy`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry.kernels.logits_heuristics import loss_bytes
from liger_registry_cuda._logits import implementations

IMPLEMENTATIONS = implementations("cross_entropy", loss_bytes)
