"""A fixed sample of rms_norm's configs compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

import liger_registry_cuda.rms_norm
import liger_registry_rocm.rms_norm
from liger_registry import Device
from liger_registry._triton import kernel_parameters
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops.rms_norm import OP

DEVICES = {
    "a100": liger_registry_cuda.rms_norm,
    "h200": liger_registry_cuda.rms_norm,
    "mi300x": liger_registry_rocm.rms_norm,
}
CASES = [(device, implementation) for device, backend in DEVICES.items() for implementation in backend.IMPLEMENTATIONS]
HIDDEN = (41, 128, 1536, 4096, 16384, 131072)


def problem(implementation, rows, hidden, x="bfloat16", weight="bfloat16", casting="llama", needs=(True, True)):
    inputs = (
        torch.empty(rows, hidden, dtype=getattr(torch, x), device="meta"),
        None if weight == "none" else torch.empty(hidden, dtype=getattr(torch, weight), device="meta"),
    )
    description = OP.describe(inputs, {"eps": 1e-6, "offset": 0.0, "casting": casting})
    return inputs, OP.problem(description, implementation.phase, "default", needs=needs)


def launches(
    implementation, config, device, inputs, casting="llama", needs=(True, True), aligned=True, transposed=False
):
    """What an implementation launches for inputs on the meta device."""
    options = {"eps": 1e-6, "offset": 0.0, "casting": casting}
    x, weight = inputs
    if transposed:
        x = x.view(2, -1, 4, x.shape[-1]).transpose(1, 2)
    forward = implementation.phase == "forward"
    call = implementation.bind(config, device, options, None if forward else needs)
    y, rstd = OP.schemes[0].allocate(x, weight, **options)
    with record(aligned) as records:
        call(x, weight) if forward else call(y, x, weight, rstd)
    return records


def compile_all(records, device):
    for launched in records:
        compiled = compile_record(launched, target_of(device))
        assert fits(compiled, device) is None, launched.text
        # More than a few spilled registers cost more than the config can gain.
        assert compiled.spills is None or compiled.spills <= 64, (launched.text, compiled.spills)


@pytest.mark.parametrize(("name", "implementation"), CASES, ids=lambda case: getattr(case, "name", case))
def test_heuristics_and_edges_of_the_space_compile(name, implementation):
    device = Device.parse(name)
    for hidden in HIDDEN:
        inputs, key = problem(implementation, 16, hidden)
        configs = list(implementation.space.configs(key, device))
        if not configs:
            continue
        # The untuned choice, and both ends of the declared order; the middle one moves with the width.
        sample = {implementation.heuristic(key, device), configs[0], configs[-1], configs[hidden % len(configs)]}
        for config in sample if hidden in (128, 4096, 16384) else list(sample)[:1]:
            assert implementation.why_illegal(config, key, device) is None
            compile_all(launches(implementation, config, device, inputs), device)


@pytest.mark.parametrize(("name", "implementation"), CASES, ids=lambda case: getattr(case, "name", case))
def test_what_changes_the_code_compiles(name, implementation):
    device = Device.parse(name)
    hidden = 2048
    kinds = [
        {"weight": "none"},
        {"x": "float32", "weight": "float32"},
        {"x": "float16", "weight": "float32"},
        {"casting": "gemma"},
    ]
    for kind in kinds:
        inputs, key = problem(implementation, 16, hidden, **kind)
        config = implementation.heuristic(key, device)
        compile_all(launches(implementation, config, device, inputs, kind.get("casting", "llama")), device)
    inputs, key = problem(implementation, 16, hidden)
    config = implementation.heuristic(key, device)
    compile_all(launches(implementation, config, device, inputs, aligned=False), device)
    compile_all(launches(implementation, config, device, inputs, transposed=True), device)
    if implementation.phase == "backward":
        for needs in [(True, False), (False, True)]:
            compile_all(launches(implementation, config, device, inputs, needs=needs), device)


@pytest.mark.parametrize(("name", "implementation"), CASES, ids=lambda case: getattr(case, "name", case))
def test_twenty_lengths_compile_nothing_new(name, implementation):
    device = Device.parse(name)
    _, key = problem(implementation, 4096, 1536)
    config = implementation.heuristic(key, device)
    codes = set()
    for rows in [1, 2, 3, 16, 17, *range(100, 4000, 260)]:
        inputs, _ = problem(implementation, rows, 1536)
        for launched in launches(implementation, config, device, inputs):
            module, _, kernel = launched.kernel.partition(":")
            parameters = kernel_parameters(getattr(importlib.import_module(module), kernel))
            runtime = [p for p in parameters if not p.constexpr]
            special = tuple(
                a for a, p in zip(launched.arguments, runtime, strict=False) if a.kind != "int" or p.specialize
            )
            codes.add((launched.kernel, special, launched.constexprs, launched.options))
    assert len(codes) == len({kernel for kernel, *_ in codes})


def test_more_rows_than_32_bits_hold_compile():
    device = Device.parse("h200")
    for implementation in liger_registry_cuda.rms_norm.IMPLEMENTATIONS:
        if implementation.name not in ("multi_row", "persistent"):
            continue
        inputs, key = problem(implementation, 2**31 + 5, 2)
        config = implementation.heuristic(key, device)
        compile_all(launches(implementation, config, device, inputs), device)


@pytest.mark.parametrize("name", DEVICES)
def test_spaces_are_small_and_heuristics_legal(name):
    device = Device.parse(name)
    widths = (1, 3, 41, 64, 128, 256, 768, 1024, 1536, 2048, 4096, 5120, 8192, 16384, 20000, 65536, 70000, 131072)
    kinds = [("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "none")]
    for phase, reached in (("forward", set()), ("backward", set())):
        for implementation in DEVICES[name].IMPLEMENTATIONS:
            if implementation.phase != phase:
                continue
            for rows, hidden, (x, weight) in itertools.product((1, 256, 16384, 524288), widths, kinds):
                _, key = problem(implementation, rows, hidden, x, weight)
                count = sum(1 for _ in implementation.space.configs(key, device))
                config = implementation.heuristic(key, device)
                assert count <= 64
                assert count == 0 or implementation.why_illegal(config, key, device) is None, key.text
                if count:
                    reached.add((rows, hidden))
        assert len(reached) == 4 * len(widths)  # some implementation serves every width
