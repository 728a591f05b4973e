"""The spaces that ``jsd``, ``kl_div`` and ``tvd`` share on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import divergences_heuristics as h

_WAVES = [0, 2]  # waves_per_eu: the compiler's own choice, and two, which leaves each 256 registers
_ROW = h.constrain_row(
    ConfigSpace(block=[1024, 2048, 4096, 8192], num_warps=[4, 8, 16], num_stages=[1, 2], waves_per_eu=_WAVES)
)
_TILES = h.constrain_tiles(
    ConfigSpace(
        block=[1024, 4096],
        num_warps=[4, 8, 16],
        num_stages=[1, 2],
        programs_per_unit=[0, 4, 8],
        waves_per_eu=_WAVES,
    )
)


def implementations(op: str) -> tuple[Implementation, ...]:
    """Both phases of an operation."""
    return tuple(
        Implementation(
            op=op,
            phase=phase,
            name=name,
            launch=f"liger_registry.kernels.divergences:{phase}_{name}",
            space=space,
            heuristic=partial(h.nearest_to, space, heuristic),
            extra_bytes=h.partial_bytes,
            capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase in ("forward", "backward")
        for name, space, heuristic in (("row", _ROW, h.heuristic_row), ("tiles", _TILES, h.heuristic_tiles))
    )
