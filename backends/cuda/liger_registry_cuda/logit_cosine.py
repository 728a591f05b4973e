"""``logit_cosine`` on NVIDIA GPUs."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import logit_cosine_heuristics as h
from liger_registry.kernels import logit_divergence_heuristics as walks
from liger_registry.kernels.costs import no_extra_bytes
from liger_registry.kernels.divergences_heuristics import nearest_to

_ROW = walks.constrain_row(ConfigSpace(block=[1024, 2048, 4096, 8192], num_warps=[4, 8, 16, 32], num_stages=[1, 2, 3]))
_SPLIT = walks.constrain_column_split(
    ConfigSpace(block=[1024, 2048, 4096], num_warps=[4, 8, 16], splits=[1, 2, 4, 8, 16])
)
IMPLEMENTATIONS = tuple(
    Implementation(
        op="logit_cosine",
        phase="forward",
        name=name,
        launch=f"liger_registry.kernels.logit_cosine:forward_{name}",
        space=space,
        heuristic=partial(nearest_to, space, heuristic),
        extra_bytes=extra_bytes,
        capability=Capability(vendor="cuda", min_arch="sm_80", dtypes=("float32", "float16", "bfloat16")),
    )
    for name, space, heuristic, extra_bytes in (
        ("row", _ROW, h.heuristic_row, no_extra_bytes),
        ("column_split", _SPLIT, h.heuristic_column_split, h.split_bytes),
    )
)
