"""Kernels that a sanitizer must find fault with, else its silence about others says nothing."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def writes_beyond(X, distance, BLOCK: tl.constexpr):
    tl.store(X + distance + tl.arange(0, BLOCK), 1.0)


@triton.jit
def shares_a_word(OUT, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    # Triton places barriers around all shared memory that it uses itself; this word it knows nothing of.
    seen = tl.inline_asm_elementwise(
        "{ .shared .align 4 .b32 word; st.shared.b32 [word], $1; ld.shared.b32 $0, [word]; }",
        "=r,r",
        [lane],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(OUT + lane, seen)
