"""``python -m benchmarks host``: what the host pays for one call, the dispatch alone, and importing the package.

A step that waits for launches pays this and not the kernel. The dispatch is ``handle(x, w)`` less the same autograd
function with the decision hard-wired, measured in turn and compared by medians, as a host's clock drifts more than
the 2 us that are the limit. Whoever follows the code of another finds cold caches; the rotating order gives that place
to each in turn.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import record
from benchmarks.cases import Case
from benchmarks.inputs import EPS, make
from benchmarks.measure import short
from benchmarks.peers import peers, present
from benchmarks.targets import Tally, Target
from benchmarks.timing import in_turn, synchronize
from liger_registry import registry
from liger_registry.autograd import apply_fused

FILE = "host.json"
PEERS = ("liger", "quack", "compile")
ROWS, WIDTH = 16, 4096
#: Calls that do not count, calls of a sample, and rounds; tiny for tests.
WARM, CALLS, ROUNDS = 20, 200, 60
TINY_CALLS, TINY_ROUNDS, TINY_IMPORTS = 5, 3, 1
IMPORTS = 7
TARGETS = (Target("ours.us", 22.0), Target("dispatch.us", 2.0))


def sample(function: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Samples of the mean time of a call in microseconds."""

    def once() -> float:
        synchronize()  # a full launch queue would be measured as host time
        for _ in range(WARM):
            function()
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls * 1e6

    return once


def medians(functions: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, float]:
    """The median of each function's time a call in microseconds, the functions taking turns."""
    for function in functions.values():
        for _ in range(WARM):
            function()
    seen = in_turn({name: sample(function, calls) for name, function in functions.items()}, rounds)
    return {name: statistics.median(times) for name, times in seen.items()}


def import_ms(statement: str, repeats: int) -> float:
    """The median time of a statement in a fresh interpreter that has imported torch, in milliseconds."""
    code = f"import torch, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=record.ROOT)
        for _ in range(repeats)
    ]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs) * 1e3


def run(
    device: torch.device,
    out: Path,
    *,
    rows: int = ROWS,
    width: int = WIDTH,
    names: Sequence[str] = PEERS[:2],
    scale: str = "full",
    say: Callable[[str], object] = lambda text: print(text, flush=True),
) -> dict[str, Any]:
    """Measure and keep the results in ``out/host.json``.

    Args:
        device: where.
        out: the directory of the results.
        rows: of the norm.
        width: of the norm.
        names: the peers.
        scale: full, or tiny for tests.
        say: told each line.
    """
    case = Case("rms_norm", (rows, width))
    inputs = make(case, device)
    x, w = inputs.tensors
    norm = registry.get("rms_norm")
    there, absent = present(peers(tuple(names)), device)
    calls, rounds = (CALLS, ROUNDS) if scale == "full" else (TINY_CALLS, TINY_ROUNDS)
    others: dict[str, Callable[[], Any]] = {"eager": lambda: F.rms_norm(x, x.shape[-1:], w, EPS)}
    failed: dict[str, str] = {}
    for name, peer in there.items():
        try:
            call = peer.make(case, inputs)
            if call is not None:
                call(x, w)
                others[name] = lambda call=call: call(x, w)  # type: ignore[misc]
        except Exception as problem:  # a peer that fails is reported
            failed[name] = short(problem)

    def last() -> Any:
        return norm._memo[next(reversed(norm._memo))]

    found: dict[str, dict[str, float]] = {}
    decisions: list[str] = []
    for state in ("grad", "no grad"):
        with torch.set_grad_enabled(state == "grad"):
            registry.forget()
            norm(x, w)
            entry = last()
            wired = (
                functools.partial(apply_fused, entry, x, w) if state == "grad" else functools.partial(entry.run, x, w)
            )
            times = medians({"ours": lambda: norm(x, w), "hard-wired": wired, **others}, calls, rounds)
            decisions += [f"{state}: {e.decision}" for e in norm.explain(x, w)]
        times["dispatch"] = times["ours"] - times["hard-wired"]
        found[state] = times
    imported = import_ms("import liger_registry", IMPORTS if scale == "full" else TINY_IMPORTS)
    verdicts = judge(found["grad"])
    document = {
        "command": "host",
        "about": record.about(device, scale=scale, absent=absent, failed=failed),
        "problem": {"op": "rms_norm", "rows": rows, "width": width, "dtype": "bfloat16"},
        "us": found,
        "import_ms": imported,
        "decisions": decisions,
        "targets": verdicts,
        "summary": {"targets": Tally.of([str(v["verdict"]) for v in verdicts]).text},
    }
    record.write(out / FILE, document)
    for state, times in found.items():
        say(f"# {rows}x{width}, {state}: " + "  ".join(f"{name} {us:.2f} us" for name, us in times.items()))
    say(f"# import liger_registry after torch: {imported:.2f} ms")
    for verdict in verdicts:
        say(f"# {verdict['target']}: {verdict['text']}")
    return document


def judge(times: dict[str, float]) -> list[dict[str, object]]:
    """The verdicts on times with grad, by name."""
    figures = {f"{name}.us": us for name, us in times.items()}
    return [target.judge(figures.get).to_json() for target in TARGETS]
