"""``logit_statistics`` on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from liger_registry.kernels.logits_heuristics import split_bytes
from liger_registry_rocm._logits import implementations

IMPLEMENTATIONS = implementations("logit_statistics", split_bytes)
