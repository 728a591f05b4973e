"""The spaces that ``layer_norm`` and ``fused_add_rms_norm`` share on AMD GPUs: at most 16 wavefronts of 64. Not run on
one yet."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import norm_heuristics as h
from liger_registry.kernels.rms_norm_heuristics import block_of

_WAVES = [0, 2]  # waves_per_eu: the compiler's own choice, and two, which leaves each 256 registers

_ROW = h.constrain_row(
    ConfigSpace(num_warps=[1, 2, 4, 8, 16], programs_per_unit=[0, 4, 8], num_stages=[1, 2], waves_per_eu=_WAVES)
)
_MULTI_ROW = h.constrain_multi_row(
    ConfigSpace(
        block_rows=[2, 4, 8, 16, 32, 64],
        num_warps=[4, 8],
        programs_per_unit=[0, 8],
        num_stages=[1, 2],
        waves_per_eu=_WAVES,
    )
)
_SPLIT_FORWARD = h.constrain_forward_column_split(
    ConfigSpace(splits=[2, 4, 8, 16], block=[1024, 4096], num_warps=[4, 8], waves_per_eu=_WAVES)
)
_PERSISTENT = h.constrain_persistent(
    ConfigSpace(
        block_rows=[1, 2, 4, 8, 16, 32, 64],
        num_warps=[4, 8, 16],
        programs_per_unit=[4, 8],
        num_stages=[1, 2],
        reload_weight=[False, True],
        waves_per_eu=_WAVES,
    )
).where(
    # Two tiles in fp32, their products and the sums: at 64 elements a thread 235 registers spill on gfx942, and 46 at
    # 32 where 16 wavefronts leave each thread 128 registers. Loads ahead take registers besides.
    lambda c, p, d: (
        c.block_rows * block_of(p) <= (32 if c.num_stages == 1 and c.num_warps < 16 else 16) * 64 * c.num_warps
    ),
    "a tile this large spills",
)
_SPLIT_BACKWARD = h.constrain_backward_column_split(
    ConfigSpace(
        splits=[2, 8],
        block=[1024, 4096],
        block_rows=[1, 2, 4],
        num_warps=[4, 8],
        programs_per_unit=[4],
        num_stages=[1],
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
            launch=f"liger_registry.kernels.{module}:{phase}_{name}",
            space=space,
            heuristic=partial(h.nearest, space, heuristic),
            extra_bytes=h.extra_bytes,
            capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase, name, module, space, heuristic in (
            ("forward", "row", op, _ROW, h.heuristic_row),
            ("forward", "multi_row", op, _MULTI_ROW, h.heuristic_multi_row),
            ("forward", "column_split", f"{op}_split", _SPLIT_FORWARD, h.heuristic_forward_column_split),
            ("backward", "persistent", op, _PERSISTENT, h.heuristic_persistent),
            ("backward", "column_split", f"{op}_split", _SPLIT_BACKWARD, h.heuristic_backward_column_split),
        )
    )
