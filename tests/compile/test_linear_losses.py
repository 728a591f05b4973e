"""What losses over a linear head launch themselves, compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

import liger_registry_cuda.fused_linear_cross_entropy
import liger_registry_rocm.fused_linear_cross_entropy
from liger_registry import Device
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops.fused_linear_cross_entropy import OP, described
from liger_registry.tuning.arguments import META, Arguments

BACKENDS = {
    "h200": liger_registry_cuda.fused_linear_cross_entropy,
    "mi300x": liger_registry_rocm.fused_linear_cross_entropy,
}
CASES = [(device, i) for device, backend in BACKENDS.items() for i in backend.IMPLEMENTATIONS]


def launches(implementation, config, device, sizes, dtype="bfloat16"):
    description, needs = described(sizes, dtype, dtype), (True, True, True)
    problem = OP.problem(description, "backward", "grad_in_forward", needs)
    with record() as records:
        tensors = Arguments.of(OP, problem, META).tensors
        implementation.bind(config, device, OP.options_of(problem), needs, problem)(*tensors)
    return records


@pytest.mark.parametrize(("name", "implementation"), CASES, ids=lambda case: getattr(case, "name", case))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_default_compiles_and_fits(name, implementation, dtype):
    device = Device.parse(name)
    config = implementation.heuristic(None, device)
    found = launches(implementation, config, device, (256, 512, 1031), dtype)
    assert len(found) == 3  # one for each gradient
    compiled = [compile_record(launched, target_of(device)) for launched in found[:1]]
    assert all(fits(c, device) is None and not c.spills for c in compiled)


def test_twenty_token_counts_are_at_most_two_kernels():
    device, (implementation,) = Device.parse("h200"), BACKENDS["h200"].IMPLEMENTATIONS
    codes = set()
    for tokens in [1, 2, 3, 16, *range(100, 1700, 100)]:
        for launched in launches(implementation, implementation.heuristic(None, device), device, (tokens, 512, 1031)):
            codes.add((tuple(launched.arguments), launched.constexprs, launched.options))
    assert len(codes) <= 2
