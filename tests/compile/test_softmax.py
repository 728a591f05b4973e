"""A fixed sample of softmax's configs compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

import liger_registry_cuda.softmax
import liger_registry_rocm.softmax
from liger_registry import Device
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.config import Fields
from liger_registry.launch import record
from liger_registry.op import Description
from liger_registry.ops.softmax import OP
from liger_registry.tuning.arguments import META, Arguments

BACKENDS = {"h200": liger_registry_cuda.softmax, "mi300x": liger_registry_rocm.softmax}
CASES = [(device, i) for device, backend in BACKENDS.items() for i in backend.IMPLEMENTATIONS]
SIZES = ((4096, 41), (4096, 1024), (1024, 8192), (16, 131072))


def problem(phase, rows, width, dtype="bfloat16"):
    description = Description(Fields(rows=rows, width=width), Fields(x=dtype), Fields())
    return OP.problem(description, phase, "default", (True,) if phase == "backward" else ())


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


@pytest.mark.parametrize("implementation", BACKENDS["h200"].IMPLEMENTATIONS, ids=lambda i: f"{i.phase}-{i.name}")
def test_twenty_row_counts_are_one_kernel(implementation):
    device, codes = Device.parse("h200"), {}
    config = implementation.heuristic(problem(implementation.phase, 64, 3000), device)
    for rows in [1, 2, 3, 16, *range(100, 1700, 100)]:
        for launched in launches(implementation, config, device, problem(implementation.phase, rows, 3000)):
            code = tuple(a for a in launched.arguments), launched.constexprs, launched.options
            codes.setdefault(launched.kernel, set()).add(code)
    assert codes
    assert max(map(len, codes.values())) == 1, codes
