"""A fixed sample of the configs of cross_entropy and its stage compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from liger_registry import Device
from liger_registry._triton import kernel_parameters
from liger_registry.compile import compile_record, fits, target_of
from liger_registry.launch import record
from liger_registry.ops import cross_entropy, logit_statistics

OPS = {"cross_entropy": cross_entropy.OP, "logit_statistics": logit_statistics.OP}
BACKENDS = {"a100": "cuda", "h200": "cuda", "mi300x": "rocm"}
FULL = {
    "cross_entropy": {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 30.0, "return_token_accuracy": True},
    "logit_statistics": {"softcap": 30.0, "weighted": True, "entropy": True, "predict": True},
}


def implementations(op, device):
    return importlib.import_module(f"liger_registry_{BACKENDS[device]}.{op}").IMPLEMENTATIONS


def problem(op, phase, rows, vocab, dtype="bfloat16", weight=False, **given):
    def made(*shape, kind=torch.float32):
        return torch.empty(shape, dtype=kind, device="meta")

    inputs = [made(rows, vocab, kind=getattr(torch, dtype)), made(rows, kind=torch.int64)]
    inputs += [made(vocab) if weight else None] + ([None] if op == "cross_entropy" else [])
    filled = {o.name: given.get(o.name, o.default) for o in OPS[op].options}
    return inputs, filled, OPS[op].problem(OPS[op].describe(inputs, filled), phase, "default", (True,))


def launches(implementation, config, device, inputs, options, aligned=True):
    op = OPS[implementation.op]
    scheme = op.schemes[0]
    forward = implementation.phase == "forward"
    call = implementation.bind(config, device, options, None if forward else (True,))
    results = dict(zip((*op.outputs, *scheme.saved), scheme.allocate(*inputs, **options), strict=True))
    grads = [None if name in op.constant else results[name] for name in op.outputs]
    saved = [results[name] for name in (*scheme.saved_outputs, *scheme.saved)]
    with record(aligned) as records:
        call(*inputs) if forward else call(*grads, *inputs, *saved)
    return records


def compiled(name, op, rows, vocab, **how):
    device = Device.parse(name)
    for implementation in implementations(op, name):
        aligned = how.pop("aligned", True)
        inputs, options, key = problem(op, implementation.phase, rows, vocab, **how)
        if not any(True for _ in implementation.space.configs(key, device)):
            continue
        config = implementation.heuristic(key, device)
        for launched in launches(implementation, config, device, inputs, options, aligned):
            result = compile_record(launched, target_of(device))
            assert fits(result, device) is None, launched.text
            yield launched, result


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["h200", "mi300x"])
def test_heuristics_compile_without_spills(name, op):
    for launched, result in compiled(name, op, 8192, 128256):
        assert result.spills in (None, 0), (launched.text, result.spills)


@pytest.mark.ci
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", BACKENDS)
def test_all_options_few_rows_and_odd_vocabularies_compile(name, op):
    found = set()
    for rows, vocab in ((4, 151936), (4096, 32000), (37, 50257), (4096, 41)):
        for launched, _ in compiled(name, op, rows, vocab, weight=True, dtype="float32", **FULL[op]):
            found.add(launched.kernel)
    for launched, _ in compiled(name, op, 37, 50257, aligned=False):
        found.add(launched.kernel)
    assert len(found) >= 3


@pytest.mark.parametrize("op", OPS)
def test_twenty_lengths_are_at_most_two_kernels_each(op):
    device = Device.parse("h200")
    for implementation in implementations(op, "h200"):
        _, _, key = problem(op, implementation.phase, 512, 32000)
        if not any(True for _ in implementation.space.configs(key, device)):
            continue
        config = implementation.heuristic(key, device)
        codes = set()
        for rows in [1, 2, 3, 16, 17, *range(100, 20000, 1300)]:
            inputs, options, _ = problem(op, implementation.phase, rows, 32000)
            for launched in launches(implementation, config, device, inputs, options):
                module, _, kernel = launched.kernel.partition(":")
                parameters = kernel_parameters(getattr(importlib.import_module(module), kernel))
                runtime = [p for p in parameters if not p.constexpr]
                special = tuple(
                    a for a, p in zip(launched.arguments, runtime, strict=False) if a.kind != "int" or p.specialize
                )
                codes.add((launched.kernel, special, launched.constexprs, launched.options))
        assert len(codes) <= len({kernel for kernel, *_ in codes}) + 1  # sums in one launch, or in two


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", BACKENDS)
def test_spaces_are_small_and_heuristics_legal(name, op):
    device = Device.parse(name)
    for phase in ("forward", "backward"):
        reached = set()
        for implementation in implementations(op, name):
            if implementation.phase != phase:
                continue
            for rows, vocab, full in itertools.product(
                (1, 256, 8192), (1, 3, 41, 1000, 1025, 5000, 32000, 50257, 128256, 262144), (False, True)
            ):
                _, _, key = problem(op, phase, rows, vocab, weight=full, **(FULL[op] if full else {}))
                count = sum(1 for _ in implementation.space.configs(key, device))
                assert count <= 64, key.text
                if count:
                    assert implementation.why_illegal(implementation.heuristic(key, device), key, device) is None
                    reached.add((rows, vocab, full))
        assert len(reached) == 60  # some implementation serves every problem
