"""Loading ahead: each phase is run once, on few rows of the real width, with the gradients that are needed."""

from __future__ import annotations

import dataclasses

import torch

from liger_registry import Device, registry
from liger_registry.op import Description
from liger_registry.ops.rms_norm import OP
from liger_registry.tuning.preload import _run, preload


def test_both_phases_run_once_on_few_rows_of_the_width():
    x, w = torch.empty(4096, 64, device="meta"), torch.empty(64, device="meta")
    described: Description = OP.describe((x, w), {"casting": "llama"})
    device = Device.parse("cpu")
    for phase, needs, count in (("forward", (), 2), ("backward", (True, False), 4)):
        decision = registry.decide(OP.problem(described, phase, "default", needs), device)
        calls, function = [], decision.implementation.function()

        def spy(*tensors, plain=function, seen=calls, **options):
            seen.append((tensors, options))
            return plain(*tensors, **options)

        watched = dataclasses.replace(decision.implementation, launch=spy)
        _run(registry.catalog, dataclasses.replace(decision, implementation=watched), device, torch.device("cpu"))
        ((tensors, options),) = calls
        assert len(tensors) == count
        assert tensors[0].shape == (1, 64)
        assert options.get("needs") == (needs or None)


def test_a_cpu_has_nothing_to_load():
    assert preload(registry.catalog, [], Device.parse("cpu")) == 0
