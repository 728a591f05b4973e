"""Triton compiles for GPUs that are not there: what the other tests of this directory rely on."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


@pytest.mark.parametrize(
    ("target", "binary"),
    [
        pytest.param(GPUTarget("cuda", 90, 32), "cubin", id="sm_90"),
        pytest.param(GPUTarget("hip", "gfx942", 64), "hsaco", id="gfx942"),
    ],
)
def test_kernels_compile_without_a_gpu(target, binary):
    source = triton.compiler.ASTSource(
        fn=double,
        signature={"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        constexprs={(3,): 64},
    )
    assert triton.compile(source, target=target).asm[binary][:4] == b"\x7fELF"
