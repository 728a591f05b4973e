"""The spaces that ``swiglu``, ``geglu`` and ``relu_squared`` share on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import gated_heuristics as h

# Wavefronts of 64 lanes: the tiles of NVIDIA's with twice the elements a wavefront.
_TILES = {"block_rows": [1, 2, 4, 8, 16, 32], "block": [64, 128, 256, 512, 1024, 2048, 4096], "num_warps": [4, 8]}
_WAVES = [0, 2]  # waves_per_eu: the compiler's own choice, and two, which leaves each 256 registers

_FLAT = h.constrain_flat(ConfigSpace(block=[1024, 2048, 4096, 8192], num_warps=[4, 8, 16], waves_per_eu=_WAVES))
_ROWS = h.constrain_rows(ConfigSpace(**_TILES, waves_per_eu=_WAVES))
_PERSISTENT = h.constrain_persistent(
    ConfigSpace(**_TILES, programs_per_unit=[2, 4, 8], num_stages=[1, 2], waves_per_eu=_WAVES[:1])
)


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
            capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase in ("forward", "backward")
        for name, space, heuristic in (
            ("flat", _FLAT, h.heuristic_flat),
            ("rows", _ROWS, h.heuristic_rows),
            ("persistent", _PERSISTENT, h.heuristic_persistent),
        )
    )
