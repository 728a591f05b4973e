"""The spaces that ``rope`` and ``qk_norm_rope`` share on AMD GPUs. Not run on one yet."""

from __future__ import annotations

from functools import partial

from liger_registry import Capability, ConfigSpace, Implementation
from liger_registry.kernels import rotary_heuristics as h

_WAVES = [0, 2]  # waves_per_eu: the compiler's own choice, and two, which leaves each 256 registers

_TOKENS = h.constrain_tokens(
    ConfigSpace(
        block=[8, 32, 128],
        block_rows=[1, 2, 4, 16],
        num_warps=[2, 4, 8],
        programs_per_unit=[0],
        num_stages=[1],
        waves_per_eu=_WAVES,
    )
)
_HEADS = h.constrain_heads(
    ConfigSpace(block=[1, 2, 4, 8], block_rows=[1, 4, 16], num_warps=[2, 4, 8], waves_per_eu=_WAVES)
)
_SUMS = {"num_warps": [4, 8], "programs_per_unit": [4, 8], "num_stages": [1], "waves_per_eu": _WAVES}
_TOKENS_BACKWARD = h.constrain_tokens(ConfigSpace(block=[4, 16, 32], block_rows=[1, 2, 8], **_SUMS), 32)
_HEADS_BACKWARD = h.constrain_heads(ConfigSpace(block=[1, 2, 4, 8], block_rows=[1, 4, 16], **_SUMS), 32)


def implementations(op: str) -> tuple[Implementation, ...]:
    """Both phases of an operation."""
    sums = op == "qk_norm_rope"
    return tuple(
        Implementation(
            op=op,
            phase=phase,
            name=name,
            launch=f"liger_registry.kernels.{op}:{phase}_{name}",
            space=space,
            heuristic=partial(h.nearest, space, name == "heads"),
            extra_bytes=h.extra_bytes,
            capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
        )
        for phase, name, space in (
            ("forward", "tokens", _TOKENS),
            ("forward", "heads", _HEADS),
            ("backward", "tokens", _TOKENS_BACKWARD if sums else _TOKENS),
            ("backward", "heads", _HEADS_BACKWARD if sums else _HEADS),
        )
    )
