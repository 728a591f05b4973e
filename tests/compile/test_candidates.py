from __future__ import annotations

import subprocess
import sys

import torch

from liger_registry.config import Fields
from liger_registry.device import Device
from liger_registry.launch import record
from liger_registry.problem import Problem
from liger_registry.runtime import build_catalog
from liger_registry.tuning import verify as verifying
from liger_registry.tuning.bench import Bench
from liger_registry.tuning.candidates import candidates

SCRIPT = """
from dataclasses import replace
from liger_registry.config import Config, ConfigSpace, Fields
from liger_registry.device import Device
from liger_registry.problem import Problem
from liger_registry.runtime import build_catalog
from liger_registry.tuning.bench import Bench
from liger_registry.tuning.candidates import Candidate, candidates

catalog, device = build_catalog(), Device.parse("h200")
dtypes, flags = Fields(x="bfloat16", weight="bfloat16"), Fields(casting="llama", needs="x,weight")
problem = Problem("rms_norm", "default", "backward", Fields(rows=1024, hidden=512), dtypes, flags)
bench = Bench(catalog, device, "cuda", processes=2)
default = candidates(catalog, problem, device).default
bad = replace(default.implementation, launch="liger_registry.kernels.rms_norm:not_there")
outcomes = bench.compile(problem, [default, Candidate(bad, default.config)], full=False)
counts, workers = [len(bench._pool._known)], {w._process.pid for w in bench._pool._workers if w._process}
bench.compile(problem.having(rows=4096), [default], full=False)
counts.append(len(bench._pool._known))
print(default.implementation.capability.vendor, [o.status for o in outcomes])
bench.compile(problem, [default], full=True)
counts.append(len(bench._pool._known))
print(counts, workers <= {w._process.pid for w in bench._pool._workers if w._process})
bench.close()
# The same kernels where a block may use hardly any shared memory or few threads.
small = replace(device, limits=replace(device.limits, max_threads=16))
print([o.status for o in Bench(catalog, small, "cuda", processes=2).compile(problem, [default])])
"""


def test_candidates_are_compiled_ahead_and_pruned():
    """In a process without a main module to import again, as the worker is."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    # The kernel and its sum of partial sums, which on few units are few; nothing for another row bucket; the kernel for
    # padded, transposed, scalar and misaligned gradients more, and nothing for other layouts of the weight.
    assert done.stdout.splitlines() == ["cuda ['ok', 'error']", "[3, 3, 7] True", "['resources']"], (
        done.stdout + done.stderr
    )


def test_what_is_compiled_ahead_is_what_verification_launches():
    """Tensors without values are recorded as those of the cases are, in every layout."""
    catalog, device = build_catalog(), Device.parse("h200")
    bench, op = Bench(catalog, device, "cuda"), catalog.op("rms_norm")
    for phase, needs in (("forward", {}), ("backward", {"needs": "x,weight"})):
        dtypes, flags = Fields(x="bfloat16", weight="bfloat16"), Fields(casting="llama", **needs)
        problem = Problem("rms_norm", "default", phase, Fields(rows=1024, hidden=64), dtypes, flags)
        default = candidates(catalog, problem, device).default
        kinds = bench._recipes(problem, default, full=True)
        assert len({kind.layouts for kind in kinds}) == 6
        assert {kind.units for kind in kinds} == {0, 2}
        for kind in kinds:
            case = kind.make(op, "cpu")
            _, tensors, call, _ = verifying.call_of(op, default.implementation, default.config, case, device)
            with record() as launched, torch.no_grad():
                call(*tensors)
            assert bench._record(kind, default) == launched, kind
