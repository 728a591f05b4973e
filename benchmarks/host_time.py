"""Host time of one call: the whole operation, the dispatch alone, and what importing the package costs.

Dispatch is ``handle(x, w)`` less the same autograd function with the decision hard-wired, measured in turn and
compared by medians, because a host's clock drifts more than the 2 us that are the limit.

    python benchmarks/host_time.py [--rows 16] [--hidden 4096] [--dtype bfloat16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from liger_registry import registry
from liger_registry.autograd import apply_fused


def in_turn(functions: dict[str, Callable[[], Any]], rounds: int = 60, calls: int = 200) -> dict[str, float]:
    """The median over rounds of each function's mean time a call, in microseconds, the functions taking turns."""
    seen: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(calls):
            function()
    names = list(functions)
    for turn in range(rounds):
        # Whoever follows the code of another finds cold caches; rotating the order gives that place to each in turn.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            function = functions[name]
            synchronize()
            for _ in range(20):
                function()
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            seen[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(times) for name, times in seen.items()}


def synchronize() -> None:
    """Wait for the GPU, if there is one: a full launch queue would be measured as host time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def import_ms(statement: str, repeats: int = 7) -> float:
    """The median time of a statement in a fresh interpreter that has imported torch, in milliseconds."""
    code = f"import torch, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeats)
    ]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs) * 1e3


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    x = torch.randn(arguments.rows, arguments.hidden, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(arguments.hidden, device=device, dtype=dtype, requires_grad=True)
    norm = registry.get("rms_norm")

    def entry_of_the_last_call() -> Any:
        return norm._memo[next(reversed(norm._memo))]

    norm(x, w)
    with_grad = entry_of_the_last_call()
    with torch.no_grad():
        norm(x, w)
        without_grad = entry_of_the_last_call()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "problem": [arguments.rows, arguments.hidden, arguments.dtype],
        "decisions": [str(explanation.decision) for explanation in norm.explain(x, w)],
    }
    times = in_turn(
        {
            "handle, grad": lambda: norm(x, w),
            "hard-wired, grad": lambda: apply_fused(with_grad, x, w),
            "torch.nn.functional.rms_norm, grad": lambda: torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-6),
        }
    )
    with torch.no_grad():
        times |= in_turn(
            {
                "handle, no grad": lambda: norm(x, w),
                "hard-wired, no grad": lambda: without_grad.run(x, w),
                "torch.nn.functional.rms_norm, no grad": lambda: torch.nn.functional.rms_norm(
                    x, (x.shape[-1],), w, 1e-6
                ),
            }
        )
    times["dispatch, grad"] = times["handle, grad"] - times["hard-wired, grad"]
    times["dispatch, no grad"] = times["handle, no grad"] - times["hard-wired, no grad"]
    result["us"] = {name: round(us, 3) for name, us in times.items()}
    result["import_ms"] = round(import_ms("import liger_registry"), 2)
    for name, us in times.items():
        print(f"{name:40} {us:8.2f} us")
    print(f"{'import liger_registry after torch':40} {result['import_ms']:8.2f} ms")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
