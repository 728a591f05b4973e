"""The soak that runs on a GPU (tests/gpu/soak.py), tried on the CPU: it finds nothing where nothing is wrong, and finds
what was planted."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soaking import MOST_DEVICE_GROWTH, Memory, Soak

import liger_registry.ops
import liger_registry.portable
from liger_registry.catalog import Catalog
from liger_registry.implementation import Implementation
from liger_registry.ops.swiglu import OP
from liger_registry.runtime import Registry

ROOT = Path(__file__).parents[2]


def last_rows(gate, up, *, device, **options):
    """Of a number of rows that is no multiple of four, what is beyond it is not computed."""
    y = OP.reference(gate, up, **options)
    rows = y.view(-1, y.shape[-1]).clone()
    rows[rows.shape[0] // 4 * 4 :] = 0
    return (rows.view(y.shape),)


def in_place(gate, up, *, device, **options):
    y = OP.reference(gate, up, **options)
    up[..., :1] += 1
    return (y,)


calls = itertools.count()


def every_other(gate, up, *, device, **options):
    """Rounds differently every other time, as a sum in another order does."""
    y = OP.reference(gate, up, **options)
    return (y * (1 + torch.finfo(y.dtype).eps) if next(calls) % 2 else y,)


def registry_of(*functions) -> Registry:
    catalog = Catalog()
    with catalog.stage("liger-registry") as staging:
        for part in (liger_registry.ops, liger_registry.portable):
            part.register(staging)
        for function in functions:
            staging.register(Implementation("swiglu", "forward", function.__name__, function))
    return Registry(catalog=catalog)


def soak(registry: Registry, bursts: int, *ops: str, until: str = "no such fault") -> Soak:
    """Some bursts, until there is a fault."""
    found = Soak(registry, "cpu", 5, 1 << 10, ops)
    for number in range(bursts):
        found.burst(number)
        if any(until in text for text in found.failures):
            break
    return found


def test_it_finds_nothing_where_nothing_is_wrong():
    found = soak(registry_of(), 10, "swiglu", "softmax")
    assert found.failures == []
    calls = sum(count.calls for count in found.counts.values())
    assert calls == 80
    assert sum(count.results for count in found.counts.values()) > calls
    for count in found.counts.values():
        assert 0 < count.norm.share <= 1
        assert 0 < count.element.share <= 1
        assert len(count.shapes) > 8
        assert len(count.implementations) > 2


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (last_rows, "worst element"),
        (in_place, "it wrote into its inputs or gradients"),
        (every_other, "a second run gives other bits"),
    ],
)
def test_it_finds_what_was_planted(function, fault):
    registry = registry_of(function)
    found = soak(registry, 40, "swiglu", until=fault)
    wrong = [text for text in found.failures if fault in text]
    assert wrong
    # Nothing else was planted.
    assert all(f"any:{function.__name__}" in text for text in found.failures)
    # The burst that a failure names shows it again.
    (burst,) = re.findall(r"--burst (\d+)", wrong[0])
    alone = Soak(registry, "cpu", found.seed, found.most, ("swiglu",))
    alone.burst(int(burst))
    assert any(fault in text for text in alone.failures)


def test_what_a_run_leaves_behind_is_growth_and_what_it_once_used_is_not():
    step = MOST_DEVICE_GROWTH // 50
    peaks = [1 << 30 if n % 3 else 1 << 20 for n in range(100)]
    assert Memory(device=peaks, host=peaks).faults() == []
    (fault,) = Memory(device=[n * step for n in range(200)], host=peaks).faults()
    assert re.fullmatch(r"device memory grew by \d+ MiB in the second half of the run", fault)


@pytest.mark.ci
def test_the_command(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu.soak", "--device", "cpu", "--seconds", "4", "--seed", "3"]
    environment = {**os.environ, "LIGER_PIN": "no_such_op=nothing"}  # the user's own settings are not what is soaked
    ran = subprocess.run(
        [*command, "--processes", "2", "--most", "1024", "--json", str(report)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = json.loads(report.read_text())
    assert said["calls"] == sum(op["calls"] for op in said["ops"].values()) > 0
    assert f'"calls": {said["calls"]}' in ran.stdout
    assert said["failures"] == 0
