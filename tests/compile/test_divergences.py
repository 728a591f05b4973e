"""The kernels of ``jsd``, ``kl_div``, ``tvd`` and their stages over logits compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from liger_registry import Device
from liger_registry._triton import kernel_parameters
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops import jsd, kl_div, logit_cosine, logit_divergence, tvd

BACKENDS = {"a100": "cuda", "h200": "cuda", "mi300x": "rocm"}
OPS = {op.name: op for op in (jsd.OP, kl_div.OP, tvd.OP, logit_divergence.OP, logit_cosine.OP)}


def implementations(op, device):
    return importlib.import_module(f"liger_registry_{BACKENDS[device]}.{op}").IMPLEMENTATIONS


def problem(op, description, phase, rows, vocab):
    described = replace(description, dims=description.dims.having(rows=rows, vocab=vocab))
    return OPS[op].problem(described, phase, "default", (True,) if OPS[op].differentiable else ())


def launches(implementation, config, device, key, rows):
    op = OPS[implementation.op]
    options, inputs = op.options_of(key), op.example(key.having(rows=rows), "meta")
    backward = implementation.phase == "backward"
    call = implementation.bind(config, device, options, (True,) if backward else None)
    with record(True) as records:
        if backward:
            loss, scale = op.schemes[0].allocate(*inputs, **options)
            call(loss, *inputs, scale)
        else:
            call(*inputs)
    return records


def compile_all(name, op, descriptions):
    device = Device.parse(name)
    for implementation in implementations(op, name):
        for description in descriptions:
            key = problem(op, description, implementation.phase, 64, 32000)
            config = implementation.heuristic(key, device)
            assert implementation.why_illegal(config, key, device) is None
            for launched in launches(implementation, config, device, key, 64):
                compiled = compile_record(launched, target_of(device))
                assert fits(compiled, device) is None, launched.text
                assert compiled.spills in (None, 0), (launched.text, compiled.spills)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("h200", "jsd"),
        pytest.param("mi300x", "logit_divergence", marks=pytest.mark.ci),
        pytest.param("mi300x", "logit_cosine", marks=pytest.mark.ci),
        pytest.param("a100", "logit_cosine", marks=pytest.mark.ci),
    ],
)
def test_heuristics_compile(name, op):
    compile_all(name, op, [next(iter(OPS[op].odd("bfloat16")))])


@pytest.mark.ci
@pytest.mark.parametrize("op", OPS)
def test_what_changes_the_code_compiles(op):
    compile_all("h200", op, {d.flags: d for d in OPS[op].odd("bfloat16")}.values())


@pytest.mark.parametrize("op", OPS)
def test_twenty_lengths_compile_nothing_new(op):
    device = Device.parse("h200")
    for implementation in implementations(op, "h200"):
        description = next(iter(OPS[op].odd("bfloat16")))
        key = problem(op, description, implementation.phase, 512, 32000)
        config, codes = implementation.heuristic(key, device), set()
        for rows in [1, 2, 3, 16, 17, *range(100, 4000, 260)]:
            for launched in launches(implementation, config, device, key, rows):
                module, _, kernel = launched.kernel.partition(":")
                parameters = kernel_parameters(getattr(importlib.import_module(module), kernel))
                runtime = [p for p in parameters if not p.constexpr]
                special = tuple(
                    a for a, p in zip(launched.arguments, runtime, strict=False) if a.kind != "int" or p.specialize
                )
                codes.add((launched.kernel, special, launched.constexprs, launched.options))
        kernels = {code[0] for code in codes}
        assert len(codes) == len(kernels), implementation.name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", BACKENDS)
def test_spaces_are_small_and_heuristics_legal(name, op):
    device = Device.parse(name)
    for dtype in ("bfloat16", "float32"):
        for description in {d.flags: d for d in OPS[op].odd(dtype)}.values():
            for rows, vocab in ((1, 1), (1, 128256), (16384, 41), (16384, 128256)):
                legal = 0
                for implementation in implementations(op, name):
                    key = problem(op, description, implementation.phase, rows, vocab)
                    count = sum(1 for _ in implementation.space.configs(key, device))
                    assert count <= 64, (implementation.name, key.text)
                    if count:
                        legal += 1
                        config = implementation.heuristic(key, device)
                        assert implementation.why_illegal(config, key, device) is None, key.text
                assert legal >= 1
