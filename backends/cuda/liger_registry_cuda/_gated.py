"""The spaces that ``swiglu``, ``geglu`` and ``relu_squared`` share on NVIDIA GPUs."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import gated_heuristics as h

_TILES = {"block_rows": [1, 2, 4, 8, 16, 32], "block": [64, 128, 256, 512, 1024, 2048, 4096], "num_warps": [4, 8]}

_FLAT = h.constrain_flat(ConfigSpace(block=[1024, 2048, 4096, 8192], num_warps=[4, 8, 16]))
_ROWS = h.constrain_rows(ConfigSpace(**_TILES))
_PERSISTENT = h.constrain_persistent(ConfigSpace(**_TILES, programs_per_unit=[1, 2, 4, 8], num_stages=[2, 3, 4]))


def implementations(op: str) -> tuple[Implementation, ...]:
    """Both phases of an operation."""
    return tuple(
        Implementation(
            op=op,
            phase=phase,
            name=name,
            launch=f"liger_registry.kernels.{op}:{phase}_{name}",
            space=space,
            heuristic=partial(h.legal, space, heuristic),
            capability=Capability(vendor="cuda", min_arch="sm_80", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase in ("forward", "backward")
        for name, space, heuristic in (
            ("flat", _FLAT, h.heuristic_flat),
            ("rows", _ROWS, h.heuristic_rows),
            ("persistent", _PERSISTENT, h.heuristic_persistent),
        )
    )
