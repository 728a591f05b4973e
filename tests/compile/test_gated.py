"""A fixed sample of the configs of swiglu, geglu and relu_squared compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from liger_registry import Device
from liger_registry._triton import kernel_parameters
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops import geglu, relu_squared, swiglu

BACKENDS = {"a100": "cuda", "h200": "cuda", "mi300x": "rocm"}
OPS = {"swiglu": swiglu.OP, "geglu": geglu.OP, "relu_squared": relu_squared.OP}
WIDTHS = (1, 41, 1000, 2048, 14336, 131072)


def implementations(op, device):
    module = importlib.import_module(f"liger_registry_{BACKENDS[device]}.{op}")
    return module.IMPLEMENTATIONS


def problem(op, phase, rows, width, dtype="bfloat16", packed=False, **options):
    def made(*shape):
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    if op == "relu_squared":
        inputs = (made(rows, width),)
    else:
        inputs = (made(rows, 2 * width), None) if packed else (made(rows, width), made(rows, width))
    filled = {o.name: options.get(o.name, o.default) for o in OPS[op].options}
    needs = tuple(t is not None for t in inputs)
    return inputs, filled, OPS[op].problem(OPS[op].describe(inputs, filled), phase, "default", needs)


def launches(implementation, config, device, inputs, options, aligned=True, transposed=False):
    if transposed:
        inputs = tuple(None if t is None else t.view(2, -1, 4, t.shape[-1]).transpose(1, 2) for t in inputs)
    forward = implementation.phase == "forward"
    call = implementation.bind(config, device, options, None if forward else tuple(t is not None for t in inputs))
    (dy,) = OPS[implementation.op].schemes[0].allocate(*inputs, **options)
    with record(aligned) as records:
        call(*inputs) if forward else call(dy, *inputs)
    return records


def compile_all(records, device):
    for launched in records:
        compiled = compile_record(launched, target_of(device))
        assert fits(compiled, device) is None, launched.text
        assert compiled.spills in (None, 0), (launched.text, compiled.spills)


def heuristic_launches(name, op, phase, kind, **how):
    device = Device.parse(name)
    for implementation in implementations(op, name):
        if implementation.phase != phase:
            continue
        inputs, options, key = problem(op, phase, 64, 4864, **kind)
        if not any(True for _ in implementation.space.configs(key, device)):
            continue
        config = implementation.heuristic(key, device)
        assert implementation.why_illegal(config, key, device) is None
        compile_all(launches(implementation, config, device, inputs, options, **how), device)


@pytest.mark.parametrize(("name", "op"), [("h200", "swiglu"), ("a100", "geglu"), ("mi300x", "swiglu")])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_heuristics_compile(name, op, phase):
    heuristic_launches(name, op, phase, {})


@pytest.mark.ci
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_changes_the_code_compiles(phase):
    for kind in ({"packed": True}, {"dtype": "float32"}, {"gate_multiplier": 2.0}):
        heuristic_launches("h200", "swiglu", phase, kind)
    heuristic_launches("h200", "geglu", phase, {"approximate": "none", "packed": True})
    heuristic_launches("mi300x", "geglu", phase, {"approximate": "none"})
    heuristic_launches("h200", "relu_squared", phase, {})
    heuristic_launches("h200", "swiglu", phase, {}, aligned=False)
    heuristic_launches("h200", "swiglu", phase, {"packed": True}, transposed=True)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_twenty_lengths_compile_nothing_new(phase):
    device = Device.parse("h200")
    for op, implementation in ((o, i) for o in OPS for i in implementations(o, "h200") if i.phase == phase):
        _, _, key = problem(op, phase, 4096, 1536)
        config, codes = implementation.heuristic(key, device), set()
        for rows in [1, 2, 3, 16, 17, *range(100, 4000, 260)]:
            inputs, options, _ = problem(op, phase, rows, 1536)
            for launched in launches(implementation, config, device, inputs, options):
                module, _, kernel = launched.kernel.partition(":")
                parameters = kernel_parameters(getattr(importlib.import_module(module), kernel))
                runtime = [p for p in parameters if not p.constexpr]
                special = tuple(
                    a for a, p in zip(launched.arguments, runtime, strict=False) if a.kind != "int" or p.specialize
                )
                codes.add((launched.kernel, special, launched.constexprs, launched.options))
        assert len(codes) == 1, implementation.name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_spaces_are_small_and_heuristics_legal(name, packed):
    device = Device.parse(name)
    for phase, dtype in itertools.product(("forward", "backward"), ("bfloat16", "float32")):
        for rows, width in itertools.product((1, 16384), WIDTHS):
            _, _, key = problem("swiglu", phase, rows, width, dtype, packed)
            legal = 0
            for implementation in (i for i in implementations("swiglu", name) if i.phase == phase):
                count = sum(1 for _ in implementation.space.configs(key, device))
                assert count <= 64, (implementation.name, key.text)
                if count:
                    legal += 1
                    config = implementation.heuristic(key, device)
                    assert implementation.why_illegal(config, key, device) is None, key.text
            assert legal == (2 if packed else 3)  # every width has as many
