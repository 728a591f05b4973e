"""``rms_norm`` on AMD GPUs: at most 16 wavefronts of 64, and programs by the thousand. Not run on one yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from liger_registry import Capability, Config, ConfigSpace, Device, Implementation, Problem
from liger_registry.kernels import rms_norm_heuristics as h

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
    # 64 rows of 128 with 4 wavefronts spill 302 registers a lane on gfx942, with one stage none.
    lambda c, p, d: c.num_stages == 1 or c.block_rows * h.block_of(p) <= 16 * 64 * c.num_warps,
    "loads ahead of a tile this large spill",
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


def _heuristic(
    space: ConfigSpace, wanted: Callable[[Problem, Device], Config], problem: Problem, device: Device
) -> Config:
    return h.nearest(space, wanted(problem, device), problem, device)


IMPLEMENTATIONS = tuple(
    Implementation(
        op="rms_norm",
        phase=phase,
        name=name,
        launch=f"liger_registry.kernels.{module}:{phase}_{name}",
        space=space,
        heuristic=partial(_heuristic, space, heuristic),
        extra_bytes=h.partial_bytes,
        capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
    )
    for phase, name, module, space, heuristic in (
        ("forward", "row", "rms_norm", _ROW, h.heuristic_row),
        ("forward", "multi_row", "rms_norm", _MULTI_ROW, h.heuristic_multi_row),
        ("forward", "column_split", "rms_norm_split", _SPLIT_FORWARD, h.heuristic_forward_column_split),
        ("backward", "persistent", "rms_norm", _PERSISTENT, h.heuristic_persistent),
        ("backward", "column_split", "rms_norm_split", _SPLIT_BACKWARD, h.heuristic_backward_column_split),
    )
)
