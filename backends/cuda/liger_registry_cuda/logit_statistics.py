"""``logit_statistics`` on NVIDIA GPUs."""

from __future__ import annotations

from liger_registry.kernels.logits_heuristics import split_bytes
from liger_registry_cuda._logits import implementations

IMPLEMENTATIONS = implementations("logit_statistics", split_bytes)
