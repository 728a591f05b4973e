"""A fixed sample of group_norm's configs compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

import liger_registry_cuda.group_norm
import liger_registry_rocm.group_norm
from liger_registry import Device
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.config import Fields
from liger_registry.launch import record
from liger_registry.op import Description
from liger_registry.ops.group_norm import OP
from liger_registry.tuning.arguments import META, Arguments

BACKENDS = {"h200": liger_registry_cuda.group_norm, "mi300x": liger_registry_rocm.group_norm}
CASES = [(device, i) for device, backend in BACKENDS.items() for i in backend.IMPLEMENTATIONS]
# Images of 8 x 8, 7 x 7 and 128 x 128 positions, and two seconds of sound in groups of one channel.
SIZES = ((2, 320, 32, 64), (2, 320, 32, 49), (1, 128, 32, 16384), (4, 512, 512, 6400))


def problem(phase, batch, channels, groups, spatial, dtype="bfloat16"):
    description = Description(
        Fields(batch=batch, channels=channels, spatial=spatial),
        Fields(x=dtype, weight=dtype, bias=dtype),
        Fields(groups=groups),
    )
    return OP.problem(description, phase, "default", (True, True, True) if phase == "backward" else ())


def launches(implementation, config, device, key, layouts=("guarded", "guarded")):
    needs = OP.needs(key) if key.phase == "backward" else None
    with record() as records:
        implementation.bind(config, device, OP.options_of(key), needs)(*Arguments.of(OP, key, META, layouts).tensors)
    return records


def compile_all(records, device):
    for launched in records:
        compiled = compile_record(launched, target_of(device))
        assert fits(compiled, device) is None, launched.text
        # More than a few spilled registers cost more than the config can gain.
        assert compiled.spills is None or compiled.spills <= 64, (launched.text, compiled.spills)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "implementation"), CASES, ids=lambda case: getattr(case, "name", case))
def test_heuristics_and_edges_of_the_space_compile(name, implementation):
    device = Device.parse(name)
    for size in SIZES:
        key = problem(implementation.phase, *size)
        configs = list(implementation.space.configs(key, device))
        if configs:
            for config in dict.fromkeys((implementation.heuristic(key, device), configs[0], configs[-1])):
                compile_all(launches(implementation, config, device, key), device)


def test_one_of_each_compiles_for_strided_tensors():
    device = Device.parse("h200")
    for implementation in BACKENDS["h200"].IMPLEMENTATIONS:
        key = problem(implementation.phase, 1, 64, 32, 2048)
        config = implementation.heuristic(key, device)
        if implementation.why_illegal(config, key, device) is None:
            compile_all(launches(implementation, config, device, key, ("padded", "transposed")), device)


@pytest.mark.parametrize("implementation", BACKENDS["h200"].IMPLEMENTATIONS, ids=lambda i: f"{i.phase}-{i.name}")
def test_twenty_sizes_are_two_kernels_at_most(implementation):
    """With one config: those that 16 divides and the others; batches change nothing at all."""
    device, codes = Device.parse("h200"), {}
    largest = problem(implementation.phase, 1, 64, 32, 1024)
    config = implementation.heuristic(largest, device)
    for number in range(20):
        key = problem(implementation.phase, 1 + number % 5, 64, 32, 600 + 17 * number)
        for launched in launches(implementation, config, device, key):
            kinds = tuple((a.kind, a.dtype, a.aligned, a.value if a.kind == "int" else 0) for a in launched.arguments)
            code = kinds, launched.constexprs, launched.options
            codes.setdefault(launched.kernel, set()).add(code)
    assert codes
    assert max(map(len, codes.values())) <= 2, codes
