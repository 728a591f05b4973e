"""The process is what the other tests of this directory take it for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


def test_kernels_run_on_cpu_tensors():
    x, y = torch.arange(10.0), torch.full((12,), -1.0)
    double[(3,)](x, y, 10, BLOCK=4)
    assert torch.equal(y, torch.cat([2 * x, torch.tensor([-1.0, -1.0])]))
