"""Right bf16 conversions for Triton's interpreter.

Up to 3.7, the newest there is, it cuts fp32 off to bf16, and where it is told to round it loses the carry; every GPU
rounds to nearest even. Results would be off by a bit in every second element, and verification rightly refuses them.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def exact_bfloat16() -> None:
    """Replace the interpreter's conversions between fp32 and bf16; calling it again changes nothing."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = getattr(interpreter, "_convert_float", None)
    if original is None or hasattr(original, "original"):
        return

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:  # noqa: ANN401
        if source == tl.bfloat16 and target == tl.float32:
            return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16 and "RTZ" not in str(rounding):
            bits = np.ascontiguousarray(values).view(np.uint32)
            nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return np.where(nan, bits >> 16 | 0x40, nearest).astype(np.uint16)
        return original(values, source, target, rounding)

    convert.original = original  # type: ignore[attr-defined]
    interpreter._convert_float = convert
