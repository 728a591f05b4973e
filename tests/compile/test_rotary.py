"""Launches of rope and qk_norm_rope compiled for GPUs that are not there, and what makes Triton compile anew."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

import liger_registry_cuda.qk_norm_rope
import liger_registry_cuda.rope
import liger_registry_rocm.qk_norm_rope
import liger_registry_rocm.rope
from liger_registry import Device
from liger_registry import compile as compiling
from liger_registry._triton import kernel_parameters
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops import qk_norm_rope, rope

OPS = {"rope": rope.OP, "qk_norm_rope": qk_norm_rope.OP}
DEVICES = {"a100": liger_registry_cuda, "h200": liger_registry_cuda, "mi300x": liger_registry_rocm}
CASES = [(d, i) for d, b in DEVICES.items() for op in OPS for i in getattr(b, op).IMPLEMENTATIONS]
every_case = pytest.mark.parametrize(
    ("name", "implementation"), CASES, ids=lambda c: c if isinstance(c, str) else f"{c.op}-{c.phase}-{c.name}"
)
QWEN, GEMMA, PARTIAL = (32, 8, 128, 128), (4, 1, 256, 256), (32, 32, 80, 32)


def launches(implementation, device, tokens, sizes, batch=2, by_heads=False, needs=None, **flags):
    """What the untuned choice launches, gradients (batch, heads, tokens, head_dim) in memory if ``by_heads``."""
    op = OPS[implementation.op]
    heads_q, heads_k, width, rotary = sizes

    def meta(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    q, k = (meta(batch, tokens, n, width).transpose(1, 2) for n in (heads_q, heads_k))
    columns = rotary // 2 if flags.get("half") else rotary
    weights = [meta(width), meta(width)] if op.name == "qk_norm_rope" else []
    inputs = (q, k, *weights, meta(1, tokens, columns), meta(1, tokens, columns))
    options = {**{o.name: o.default for o in op.options}, **flags}
    needs = (True,) * len(op.differentiable) if needs is None else needs
    key = op.problem(op.describe(inputs, options), implementation.phase, "default", needs)
    config = implementation.heuristic(key, device)
    assert implementation.why_illegal(config, key, device) is None
    forward, scheme = implementation.phase == "forward", op.schemes[0]
    results = scheme.allocate(*inputs, **options)
    named = dict(zip((*(i.name for i in op.inputs), *op.outputs, *scheme.saved), (*inputs, *results), strict=True))
    held = [named[name] for name in (*scheme.saved_inputs, *scheme.saved)]
    grads = [y.contiguous() if by_heads else y for y in results[:2]]
    call = implementation.bind(config, device, options, None if forward else needs)
    with record() as records:
        call(*inputs) if forward else call(*grads, *held)
    assert records
    return records


def compile_all(records, device):
    for launched in records:
        compiled = compile_record(launched, target_of(device))
        assert fits(compiled, device) is None, launched.text
        assert compiled.spills is None or compiled.spills <= 64, (launched.text, compiled.spills)


@pytest.mark.parametrize("op", OPS)
def test_untuned_choices_compile(op):
    device = Device.parse("h200")
    for implementation in getattr(liger_registry_cuda, op).IMPLEMENTATIONS:
        if implementation.name == "tokens":  # the others' turn comes in the second tier
            compile_all(launches(implementation, device, 4096, QWEN), device)


@pytest.mark.parametrize("implementation", ["tokens", "heads"])
@pytest.mark.parametrize("op", OPS)
def test_no_product_is_taken_unrounded(op, implementation):
    """Without ``.rn`` ptxas may make one instruction of a product in bf16 and a sum: a fifth of the entries differ."""
    device = Device.parse("h200")
    (item,) = (i for i in getattr(liger_registry_cuda, op).IMPLEMENTATIONS
               if (i.name, i.phase) == (implementation, "forward"))  # fmt: skip
    for launched in launches(item, device, 512, (16, 8, 128, 128)):
        source, options, _ = compiling._source(launched, target_of(device))
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert re.search(r"\b(?:add|sub)\.rn\.bf16", code)
        assert re.findall(r"\b(?:mul|add|sub|fma)\.(?:rn\.)?bf16.*", re.sub(r"\b(?:mul|add|sub)\.rn\.", "", code)) == []


@pytest.mark.ci
@every_case
def test_untuned_choices_compile_everywhere(name, implementation):
    device = Device.parse(name)
    for sizes in (QWEN, GEMMA, PARTIAL):
        compile_all(launches(implementation, device, 4096, sizes, by_heads=True), device)
    compile_all(launches(implementation, device, 4096, PARTIAL, interleaved=True), device)
    if implementation.op == "rope":
        flags = {"interleaved": True, "half": True}
        compile_all(launches(implementation, device, 4096, QWEN, deinterleave=True, **flags), device)
        compile_all(launches(implementation, device, 4096, QWEN, wide=True, **flags), device)


def codes(implementation, device, shapes, **given):
    """All that Triton specialises on in the launches of some shapes."""
    found = set()
    for batch, tokens in shapes:
        for launched in launches(implementation, device, tokens, QWEN, batch, **given):
            module, _, kernel = launched.kernel.partition(":")
            declared = kernel_parameters(getattr(importlib.import_module(module), kernel))
            runtime = [p for p in declared if not p.constexpr]
            pairs = zip(launched.arguments, runtime, strict=False)
            special = tuple(a for a, p in pairs if a.kind != "int" or p.specialize)
            found.add((launched.kernel, special, launched.constexprs, launched.options))
    return found


@every_case
def test_twenty_lengths_compile_nothing_new(name, implementation):
    device = Device.parse(name)
    # Enough tokens that each is of one bucket's config: what varies is the length alone.
    shapes = [(batch, tokens) for batch in (1, 3) for tokens in range(4097, 8000, 390)]
    for by_heads in (False, True):
        found = codes(implementation, device, shapes, by_heads=by_heads)
        assert len(found) == len({kernel for kernel, *_ in found})


def test_vectors_are_loaded_sixteen_bytes_at_a_time():
    # Strides are not specialised on, and yet the compiler must see that rows are aligned.
    device = Device.parse("h200")
    for implementation in liger_registry_cuda.rope.IMPLEMENTATIONS:
        for launched in launches(implementation, device, 4097, QWEN, by_heads=True):
            assert dict(launched.constexprs)["ALIGN"] == 16


@pytest.mark.ci
def test_more_elements_than_32_bits_hold_compile():
    device = Device.parse("h200")
    for op in OPS:
        for implementation in getattr(liger_registry_cuda, op).IMPLEMENTATIONS:
            if implementation.name == "tokens":
                compile_all(launches(implementation, device, 2**26, (1, 1, 64, 64), batch=1), device)
