"""A fixed sample of layer_norm's and fused_add_rms_norm's configs compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

import liger_registry_cuda
import liger_registry_cuda.fused_add_rms_norm
import liger_registry_cuda.layer_norm
import liger_registry_rocm.fused_add_rms_norm
import liger_registry_rocm.layer_norm
from liger_registry import Device
from liger_registry._triton import kernel_parameters
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops import fused_add_rms_norm, layer_norm

OPS = {"layer_norm": layer_norm.OP, "fused_add_rms_norm": fused_add_rms_norm.OP}
DEVICES = {"a100": liger_registry_cuda, "h200": liger_registry_cuda, "mi300x": liger_registry_rocm}
CASES = [
    (device, implementation)
    for device, backend in DEVICES.items()
    for op in OPS
    for implementation in getattr(backend, op).IMPLEMENTATIONS
]
every_case = pytest.mark.parametrize(
    ("name", "implementation"), CASES, ids=lambda case: case if isinstance(case, str) else f"{case.op}-{case.name}"
)


def problem(implementation, rows, hidden, needs=None, weight="bfloat16", bias="bfloat16", x="bfloat16", **flags):
    """The problem key of actual sizes, and an example of it on the meta device."""
    op = OPS[implementation.op]
    dtypes = {"x": x, "residual": x, "weight": weight, "bias": bias}
    inputs = [
        None
        if dtypes[i.name] == "none"
        else torch.empty(
            *((rows, hidden) if i.name in ("x", "residual") else (hidden,)),
            dtype=getattr(torch, dtypes[i.name]),
            device="meta",
        )
        for i in op.inputs
    ]
    options = {o.name: flags.get(o.name, o.default) for o in op.options}
    needs = tuple(t is not None for t in inputs) if needs is None else needs
    return inputs, op.problem(op.describe(tuple(inputs), options), implementation.phase, "default", needs)


def launches(implementation, config, device, inputs, key, aligned=True, transposed=False):
    """What an implementation launches for inputs on the meta device."""
    op = OPS[implementation.op]
    options, scheme = op.options_of(key), op.schemes[0]
    if transposed:
        inputs = [t if t is None or t.dim() == 1 else t.view(2, -1, 4, t.shape[-1]).transpose(1, 2) for t in inputs]
    forward = implementation.phase == "forward"
    call = implementation.bind(config, device, options, None if forward else op.needs(key))
    results = scheme.allocate(*inputs, **options)
    named = dict(zip((*(i.name for i in op.inputs), *op.outputs, *scheme.saved), (*inputs, *results), strict=True))
    held = [named[name] for name in (*scheme.saved_inputs, *scheme.saved_outputs, *scheme.saved)]
    with record(aligned) as records:
        call(*inputs) if forward else call(*results[: len(op.outputs)], *held)
    assert records
    return records


def compile_all(records, device):
    for launched in records:
        compiled = compile_record(launched, target_of(device))
        assert fits(compiled, device) is None, launched.text
        # More than a few spilled registers cost more than the config can gain.
        assert compiled.spills is None or compiled.spills <= 64, (launched.text, compiled.spills)


def sample(implementation, device, hidden, ends=False):
    """The untuned choice at a width and, if asked for, both ends of the space and its middle."""
    inputs, key = problem(implementation, 16384, hidden)
    configs = list(implementation.space.configs(key, device))
    if not configs:
        inputs, key = problem(implementation, 16, hidden)
        configs = list(implementation.space.configs(key, device))
    if not configs:
        return inputs, key, set()
    chosen = {implementation.heuristic(key, device)}
    return inputs, key, chosen | {configs[0], configs[-1], configs[len(configs) // 2]} if ends else chosen


@every_case
def test_untuned_choices_compile(name, implementation):
    device = Device.parse(name)
    inputs, key, configs = sample(implementation, device, 4096 if implementation.name[-3:] != "row" else 768)
    for config in configs:
        compile_all(launches(implementation, config, device, inputs, key), device)


@pytest.mark.ci
@every_case
def test_untuned_choices_and_edges_of_the_space_compile_at_many_widths(name, implementation):
    device = Device.parse(name)
    for hidden in (41, 128, 1536, 4096, 16384, 131072):
        inputs, key, configs = sample(implementation, device, hidden, ends=hidden in (128, 4096, 16384))
        for config in configs:
            assert implementation.why_illegal(config, key, device) is None
            compile_all(launches(implementation, config, device, inputs, key), device)


@pytest.mark.ci
@every_case
def test_what_changes_the_code_compiles(name, implementation):
    device, op = Device.parse(name), OPS[implementation.op]
    kinds = [{"weight": "none", "bias": "none"}, {"x": "float32", "weight": "float32", "bias": "float32"}]
    kinds += [{"weight": "none"}, {"bias": "none"}] if op.name == "layer_norm" else [{"casting": "gemma"}]
    for kind in kinds:
        inputs, key = problem(implementation, 16, 2048, **kind)
        compile_all(launches(implementation, implementation.heuristic(key, device), device, inputs, key), device)
    inputs, key = problem(implementation, 16, 2048)
    config = implementation.heuristic(key, device)
    compile_all(launches(implementation, config, device, inputs, key, aligned=False), device)
    compile_all(launches(implementation, config, device, inputs, key, transposed=True), device)
    for needs in [(True, False, False), (False, True, False), (False, False, True)] * (key.phase == "backward"):
        inputs, key = problem(implementation, 16, 2048, needs)
        compile_all(launches(implementation, config, device, inputs, key), device)


@pytest.mark.ci
@every_case
def test_twenty_lengths_compile_nothing_new(name, implementation):
    device = Device.parse(name)
    _, key = problem(implementation, 4096, 1536)
    config, codes = implementation.heuristic(key, device), set()
    for rows in [1, 2, 3, 16, 17, *range(100, 4000, 260)]:
        inputs, key = problem(implementation, rows, 1536)
        for launched in launches(implementation, config, device, inputs, key):
            module, _, kernel = launched.kernel.partition(":")
            runtime = [
                p for p in kernel_parameters(getattr(importlib.import_module(module), kernel)) if not p.constexpr
            ]
            special = tuple(
                a for a, p in zip(launched.arguments, runtime, strict=False) if a.kind != "int" or p.specialize
            )
            codes.add((launched.kernel, special, launched.constexprs, launched.options))
    assert len(codes) == len({kernel for kernel, *_ in codes})


@pytest.mark.parametrize("op", OPS)
def test_more_rows_than_32_bits_hold_compile(op):
    device = Device.parse("h200")
    for implementation in getattr(liger_registry_cuda, op).IMPLEMENTATIONS:
        if implementation.name in ("multi_row", "persistent"):
            inputs, key = problem(implementation, 2**31 + 5, 2)
            compile_all(launches(implementation, implementation.heuristic(key, device), device, inputs, key), device)


@pytest.mark.ci
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DEVICES)
def test_spaces_are_small_and_heuristics_legal(name, op):
    device = Device.parse(name)
    widths = (1, 41, 128, 768, 1536, 2048, 4096, 8192, 16384, 20000, 70000, 131072)
    kinds = [("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "none")]
    for phase, reached in (("forward", set()), ("backward", set())):
        for implementation in getattr(DEVICES[name], op).IMPLEMENTATIONS:
            if implementation.phase != phase:
                continue
            for rows, hidden, (x, weight) in itertools.product((1, 16384), widths, kinds):
                _, key = problem(implementation, rows, hidden, x=x, weight=weight, bias=weight)
                count = sum(1 for _ in implementation.space.configs(key, device))
                config = implementation.heuristic(key, device)
                assert count <= 64
                assert count == 0 or implementation.why_illegal(config, key, device) is None, key.text
                if count:
                    reached.add((rows, hidden))
                    assert implementation.extra_bytes(key, config) >= 0
        assert len(reached) == 2 * len(widths)  # some implementation serves every width
