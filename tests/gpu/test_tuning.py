"""The whole of a tuning run on the GPU at hand: compile ahead, verify, measure, decide, and what fails on the way."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import planted_gpu

from liger_registry.config import Fields
from liger_registry.device import Device
from liger_registry.problem import Problem
from liger_registry.store import TableStore
from liger_registry.tuning.measure import CudaTimer, extra_bytes
from liger_registry.tuning.tuner import tune


def problem(phase, rows, hidden=4096):
    flags = {"casting": "llama"} | ({"needs": "x,weight"} if phase == "backward" else {})
    dtypes = Fields(x="bfloat16", weight="bfloat16")
    return Problem("rms_norm", "default", phase, Fields(rows=rows, hidden=hidden), dtypes, Fields(flags))


@pytest.mark.timeout(590)
def test_a_run(tmp_path):
    device, store = Device.default(), TableStore(tmp_path)
    problems = [problem(phase, rows) for rows in (16384, 1024) for phase in ("forward", "backward")]
    options = {"catalog": planted_gpu.build(), "device": device, "store": store}
    began = time.monotonic()

    def tell(progress):
        if progress.row is not None:
            print(f"{time.monotonic() - began:.1f} s", progress.row)

    report = tune(problems, catalog_source="planted_gpu:build", progress=tell, **options)
    table = store.load(device, "rms_norm")
    print(Counter((s.choice.implementation, s.problem.phase, s.status) for s in table.samples.values()))
    for sample in table.samples.values():
        if sample.status != "ok" or sample.choice.implementation.startswith("any:"):
            print(
                sample.problem.text,
                sample.choice,
                sample.status,
                sample.time_us,
                sample.extra_bytes,
                sample.detail[:300],
            )
    for stored in table.decisions.values():
        print(stored)
    assert [row.status in ("tuned", "default", "noisy") for row in report.rows] == [True] * 4
    for row in report.rows:
        assert row.time_us <= row.default_us
    statuses = {s.choice.implementation: s.status for s in table.samples_of(problems[0])}
    assert statuses["any:illegal_access"] == "crash"
    assert statuses["any:too_much"] == "memory"
    ours = [s for s in table.samples.values() if s.choice.implementation.split(":")[0] in ("cuda", "rocm")]
    assert ours
    assert {s.status for s in ours} <= {"ok", "noisy", "resources"}

    again = time.monotonic()
    second = tune(problems, catalog_source="planted_gpu:not_there", **options)
    assert second.measured == 0
    assert [row.choice for row in second.rows] == [row.choice for row in report.rows]
    assert time.monotonic() - again < 5


def test_the_timer_measures_the_gpu_and_not_the_host():
    timer = CudaTimer(torch.device("cuda", 0), Device.default().limits.l2_bytes)
    x = torch.ones(1 << 26, device="cuda")
    once = sorted(timer.time(lambda: torch.add(x, 1)) for _ in range(11))[5]
    # Launching 40 kernels takes the host longer than the GPU takes for one of them.
    small = torch.ones(256, device="cuda")
    many = sorted(timer.time(lambda: [small.add_(1) for _ in range(40)]) for _ in range(11))[5]
    bandwidth = 2 * x.numel() * 4 / once / 1e6
    print(f"{once:.1f} us for 512 MiB is {bandwidth:.2f} TB/s; {many:.1f} us for 40 small kernels")
    assert 0.2 < bandwidth < 20
    assert many < 40 * 20


def test_extra_bytes_are_those_beyond_the_results():
    x = torch.ones(1 << 20, device="cuda")
    assert extra_bytes(lambda: x + 1, x.device) == 0
    assert extra_bytes(lambda: (x + 1) + 1, x.device) == 4 << 20
