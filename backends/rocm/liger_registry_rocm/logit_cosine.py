"""``logit_cosine`` on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import logit_cosine_heuristics as h
from liger_registry.kernels import logit_divergence_heuristics as walks
from liger_registry.kernels.costs import no_extra_bytes
from liger_registry.kernels.divergences_heuristics import nearest_to

_ROW = walks.constrain_row(
    ConfigSpace(block=[1024, 2048, 4096, 8192], num_warps=[4, 8, 16], num_stages=[1, 2], waves_per_eu=[0, 2])
)
_SPLIT = walks.constrain_column_split(
    ConfigSpace(block=[1024, 2048], num_warps=[4, 8], splits=[1, 2, 4, 8, 16], waves_per_eu=[0, 2])
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
        capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
    )
    for name, space, heuristic, extra_bytes in (
        ("row", _ROW, h.heuristic_row, no_extra_bytes),
        ("column_split", _SPLIT, h.heuristic_column_split, h.split_bytes),
    )
)
