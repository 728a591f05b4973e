"""What a loss of groups of sequences launches itself, compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

import liger_registry_cuda.linear_sequence_loss
import liger_registry_rocm.linear_sequence_loss
from liger_registry import Device, registry
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops.linear_sequence_loss import OP, described
from liger_registry.tuning.arguments import META, Arguments

BACKENDS = {
    "h200": liger_registry_cuda.linear_sequence_loss,
    "mi300x": liger_registry_rocm.linear_sequence_loss,
}
CASES = [(device, i) for device, backend in BACKENDS.items() for i in backend.IMPLEMENTATIONS]


def problem(sizes, dtype="bfloat16", phase="backward"):
    budget = OP.budget(OP.problem(described(sizes, dtype, dtype), phase, "grad_in_forward", (True, True, True)))
    return OP.problem(described(sizes, dtype, dtype), phase, "grad_in_forward", (True, True, True), budget)


def launches(implementation, config, device, key):
    with record() as records:
        tensors = Arguments.of(OP, key, META).tensors
        implementation.bind(config, device, OP.options_of(key), OP.needs(key), key)(*tensors)
    return records


@pytest.mark.parametrize(("name", "implementation"), CASES, ids=lambda case: getattr(case, "name", case))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_default_compiles_and_fits(name, implementation, dtype):
    device, key = Device.parse(name), problem((256, 512, 1031, 64), dtype)
    found = launches(implementation, implementation.heuristic(key, device), device, key)
    assert len(found) == 3  # one for each gradient
    for launched in found[:1]:
        compiled = compile_record(launched, target_of(device))
        assert fits(compiled, device) is None
        assert not compiled.spills


@pytest.mark.parametrize("name", BACKENDS)
def test_twenty_token_counts_are_at_most_two_kernels(name):
    device, (implementation,) = Device.parse(name), BACKENDS[name].IMPLEMENTATIONS
    codes = set()
    for tokens in [2, 4, 16, 34, *range(100, 1700, 100)]:
        key = problem((tokens, 512, 1031, 2))
        for launched in launches(implementation, implementation.heuristic(key, device), device, key):
            codes.add((tuple(launched.arguments), launched.constexprs, launched.options))
    assert len(codes) <= 2


@pytest.mark.parametrize("name", BACKENDS)
def test_it_is_what_such_a_gpu_takes(name):
    """And forward's slabs are PyTorch's products on any device."""
    device, sizes = Device.parse(name), (8192, 4096, 128256, 2048)
    vendor = device.vendor
    assert registry.decide(problem(sizes), device).implementation.id == f"{vendor}:scale_unless_one"
    assert registry.decide(problem(sizes, phase="forward"), device).implementation.name == "group_slabs"
