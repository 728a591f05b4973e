"""The spaces that ``layer_norm`` and ``fused_add_rms_norm`` share on NVIDIA GPUs."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import norm_heuristics as h

_ROW = h.constrain_row(
    ConfigSpace(num_warps=[1, 2, 4, 8, 16, 32], programs_per_unit=[0, 1, 2, 4, 8], num_stages=[1, 2, 3])
)
_MULTI_ROW = h.constrain_multi_row(
    ConfigSpace(block_rows=[2, 4, 8, 16, 32, 64], num_warps=[4, 8], programs_per_unit=[0, 2, 8], num_stages=[1, 3])
)
_SPLIT_FORWARD = h.constrain_forward_column_split(
    ConfigSpace(splits=[2, 4, 8, 16], block=[1024, 2048, 4096], num_warps=[4, 8])
)
_PERSISTENT = h.constrain_persistent(
    ConfigSpace(
        block_rows=[1, 2, 4, 8, 16, 32, 64],
        num_warps=[2, 4, 8, 16, 32],
        programs_per_unit=[1, 2, 4, 8],
        num_stages=[1, 2, 3, 4],
        reload_weight=[False, True],
    )
)
_SPLIT_BACKWARD = h.constrain_backward_column_split(
    ConfigSpace(
        splits=[2, 8],
        block=[1024, 2048, 4096],
        block_rows=[1, 2, 4],
        num_warps=[4, 8],
        programs_per_unit=[2, 8],
        num_stages=[1, 3],
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
            capability=Capability(vendor="cuda", min_arch="sm_80", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase, name, module, space, heuristic in (
            ("forward", "row", op, _ROW, h.heuristic_row),
            ("forward", "multi_row", op, _MULTI_ROW, h.heuristic_multi_row),
            ("forward", "column_split", f"{op}_split", _SPLIT_FORWARD, h.heuristic_forward_column_split),
            ("backward", "persistent", op, _PERSISTENT, h.heuristic_persistent),
            ("backward", "column_split", f"{op}_split", _SPLIT_BACKWARD, h.heuristic_backward_column_split),
        )
    )
