"""Config spaces of losses over logits on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from liger_registry import Capability, Config, ConfigSpace, Implementation, Problem
from liger_registry.kernels import logits_heuristics as h

_MULTI_ROW = h.constrain_multi_row(
    ConfigSpace(block_rows=[1, 2, 4, 8, 16, 32], num_warps=[1, 2, 4, 8, 16, 32], programs_per_unit=[0, 4])
)
_LOOPING = h.constrain_looping(
    ConfigSpace(
        block=[1024, 2048, 4096, 8192, 16384],
        num_warps=[4, 8, 16, 32],
        programs_per_unit=[0, 1, 2, 4],
        num_stages=[1, 3],
    )
)
_COLUMN_SPLIT = h.constrain_column_split(
    ConfigSpace(splits=[2, 4, 8, 16, 32], block=[1024, 2048, 4096], num_warps=[4, 8])
)


def implementations(op: str, scratch: Callable[[Problem, Config], int]) -> tuple[Implementation, ...]:
    """The Triton implementations of an operation whose kernels take these configs.

    Args:
        op: the operation, and the module of its launch functions.
        scratch: their ``extra_bytes``.
    """
    return tuple(
        Implementation(
            op=op,
            phase=phase,
            name=name,
            launch=f"liger_registry.kernels.{op}:{phase}",
            space=space,
            heuristic=partial(h.nearest_to, space, wanted),
            extra_bytes=scratch,
            capability=Capability(vendor="cuda", min_arch="sm_80", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase, looping in (("forward", "online"), ("backward", "row"))
        for name, space, wanted in (
            ("multi_row", _MULTI_ROW, h.heuristic_multi_row),
            (looping, _LOOPING, h.heuristic_looping),
            ("column_split", _COLUMN_SPLIT, h.heuristic_column_split),
        )
    )
