"""``softmax`` on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import softmax_heuristics as h
from liger_registry.kernels.costs import no_extra_bytes

_WAVES = [0, 2]  # waves_per_eu: the compiler's own choice, and two, which leaves each 256 registers
_MULTI_ROW = h.constrain_multi_row(
    ConfigSpace(
        block_rows=[1, 2, 4, 8, 16, 32, 64],
        num_warps=[1, 2, 4, 8, 16],
        programs_per_unit=[0],
        num_stages=[1],
        waves_per_eu=_WAVES,
    )
)
_LOOPING = h.constrain_looping(
    ConfigSpace(block=[1024, 2048, 4096, 8192], num_warps=[4, 8, 16], num_stages=[1, 2], waves_per_eu=_WAVES)
)
_COLUMN_SPLIT = h.constrain_column_split(
    ConfigSpace(splits=[2, 4, 8, 16], block=[1024, 4096], num_warps=[4, 8], waves_per_eu=_WAVES)
)
IMPLEMENTATIONS = tuple(
    Implementation(
        op="softmax",
        phase=phase,
        name=name,
        launch=f"liger_registry.kernels.{module}:{phase}_{name}",
        space=space,
        heuristic=partial(h.nearest_to, space, wanted),
        extra_bytes=extra_bytes,
        capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
    )
    for phase, name, module, space, wanted, extra_bytes in (
        ("forward", "multi_row", "softmax", _MULTI_ROW, h.heuristic_multi_row, no_extra_bytes),
        ("forward", "online", "softmax", _LOOPING, h.heuristic_looping, no_extra_bytes),
        ("forward", "column_split", "softmax_split", _COLUMN_SPLIT, h.heuristic_column_split, h.split_bytes),
        ("backward", "multi_row", "softmax", _MULTI_ROW, h.heuristic_multi_row, no_extra_bytes),
        ("backward", "two_pass", "softmax", _LOOPING, h.heuristic_looping, no_extra_bytes),
        ("backward", "column_split", "softmax_split", _COLUMN_SPLIT, h.heuristic_column_split, h.split_bytes),
    )
)
