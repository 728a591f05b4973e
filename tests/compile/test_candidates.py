from __future__ import annotations

import subprocess
import sys

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
outcomes = bench.compile(problem, [default, Candidate(bad, default.config)])
print(default.implementation.capability.vendor, [o.status for o in outcomes])
# The same kernels where a block may use hardly any shared memory or few threads.
small = replace(device, limits=replace(device.limits, max_threads=16))
print([o.status for o in Bench(catalog, small, "cuda", processes=2).compile(problem, [default])])
"""


def test_candidates_are_compiled_ahead_and_pruned():
    """In a process without a main module to import again, as the worker is."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert done.stdout.splitlines() == ["cuda ['ok', 'error']", "['resources']"], done.stdout + done.stderr
