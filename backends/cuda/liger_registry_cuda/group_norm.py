"""``group_norm`` on NVIDIA GPUs."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import group_norm_heuristics as h

_BLOCKS = [1, 16, 64, 256, 1024, 4096]
_WHOLE = h.constrain_whole(ConfigSpace(block_rows=[1, 2, 4, 8, 16, 32], num_warps=[1, 2, 4, 8, 16]))
_GROUP = h.constrain_tiles(
    ConfigSpace(block=_BLOCKS, block_rows=[1, 4, 16, 64, 256], num_warps=[4, 8, 16], num_stages=[1, 3])
)
_SPLIT = h.constrain_split(
    ConfigSpace(block=_BLOCKS, block_rows=[1, 4, 16, 64, 256], num_warps=[4, 8], splits=[1, 4, 16])
)
IMPLEMENTATIONS = tuple(
    Implementation(
        op="group_norm",
        phase=phase,
        name=name,
        launch=f"liger_registry.kernels.{module}:{phase}_{name}",
        space=space,
        heuristic=partial(h.nearest_to, space, wanted),
        extra_bytes=h.scratch_bytes,
        capability=Capability(vendor="cuda", min_arch="sm_80", dtypes=("float32", "float16", "bfloat16")),
    )
    for phase in ("forward", "backward")
    for name, module, space, wanted in (
        ("whole", "group_norm_whole", _WHOLE, h.heuristic_whole),
        ("group", "group_norm", _GROUP, h.heuristic_group),
        ("split", "group_norm_split", _SPLIT, h.heuristic_split),
    )
)
