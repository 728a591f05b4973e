"""Soaks every operation in random calls for some minutes, each held against PyTorch in float64, and reports.

``python -m tests.gpu.soak --seconds 240 --seed 1`` runs on the GPU, or on the CPU where there is none. Operations,
implementations and their configs, dtypes, sizes, strides, alignment, options, the gradients that are needed and streams
are all drawn at random; see ``drawing``. Several processes share the device, because a kernel takes longer to compile
than to run. A failure comes with the command that runs its burst again; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# A call that takes longer hangs: a compile takes some seconds, and half a minute on busy cores.
HANG_S = 300
GPU_PROCESSES = 12
MOST_RESTARTS = 3


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="how long, the start of the processes left out")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other calls")
    parser.add_argument("--device", default="", help="cuda or cpu; the GPU by default if there is one")
    parser.add_argument("--processes", type=int, default=0, help="as many as there are cores for, by default")
    parser.add_argument("--most", type=int, default=0, help="elements of the largest tensor: 4 million on a GPU")
    parser.add_argument("--ops", default="", help="some operations alone, such as rms_norm,softmax")
    parser.add_argument("--burst", type=int, default=None, help="this burst alone, in this process")
    parser.add_argument("--json", type=Path, default=None, help="also write the report to a file")
    return parser.parse_args(given)


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """What was left out, by the machine at hand."""
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = options.device.startswith("cuda")
    cores = len(os.sched_getaffinity(0))
    options.processes = options.processes or (max(1, min(GPU_PROCESSES, cores - 2)) if on_gpu else 1)
    options.most = options.most or (1 << 22 if on_gpu else 1 << 13)
    return options


def work(number: int, start: int, seconds: float, options: argparse.Namespace, reports: Any) -> None:
    """One process: soaks every so many-th burst, and reports each before it begins and all of them at the end."""
    import torch
    from soaking import DeviceLostError, Soak

    from liger_registry import registry

    torch.set_num_threads(1)
    soak = Soak(registry, options.device, options.seed, options.most, tuple(filter(None, options.ops.split(","))))
    lost, told = "", 0
    try:
        for burst in soak.run(itertools.count(start, options.processes), seconds):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            reports.put({"worker": number, "burst": burst, "failures": soak.failures[told:]})
            told = len(soak.failures)
    except DeviceLostError as error:
        lost = str(error)[:300]
    faulthandler.cancel_dump_traceback_later()
    memory = soak.memory
    reports.put({
        "worker": number, "failures": soak.failures[told:], "ended": True, "lost": lost, "counts": soak.counts,
        "faults": memory.faults(), "device": memory.growth(memory.device), "host": memory.growth(memory.host),
    })  # fmt: skip


class Run:
    """All processes of a soak, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.context = multiprocessing.get_context("spawn")
        self.reports: Any = self.context.Queue()
        self.counts: dict[str, Any] = {}
        self.failures: list[str] = []
        self.memory = {"device": 0, "host": 0}
        self.bursts = self.restarts = 0
        self.latest: dict[int, int] = {}
        self.workers: dict[int, Any] = {}
        self.began = time.monotonic()

    def start(self, number: int, burst: int) -> None:
        """Start one process at a burst."""
        left = self.options.seconds - (time.monotonic() - self.began)
        given = (number, burst, left, self.options, self.reports)
        self.workers[number] = self.context.Process(target=work, args=given, daemon=True)
        self.workers[number].start()

    def all(self) -> None:
        """Run until the last process ends."""
        for number in range(self.options.processes):
            self.start(number, number)
        while self.workers:
            try:
                self.take(self.reports.get(timeout=1.0))
            except Empty:
                for number, worker in list(self.workers.items()):
                    if not worker.is_alive() and self.reports.empty():
                        self.gone(number, f"exit code {worker.exitcode}")

    def take(self, report: dict[str, Any]) -> None:
        """What a process says."""
        number = report["worker"]
        self.failures += report["failures"]
        if "burst" in report:
            self.latest[number] = report["burst"]
            self.bursts += 1
            return
        for name, count in report["counts"].items():
            self.counts.setdefault(name, type(count)()).merge(count)
        self.failures += [f"process {number}: {fault}" for fault in report["faults"]]
        self.memory = {name: max(value, report[name]) for name, value in self.memory.items()}
        self.workers.pop(number).join()
        if report["lost"]:
            self.gone(number, f"the device was lost: {report['lost']}")

    def gone(self, number: int, why: str) -> None:
        """A process ended before its time: another one goes on behind its last burst."""
        self.workers.pop(number, None)
        burst, options = self.latest.get(number, number), self.options
        again = f"python -m tests.gpu.soak --seed {options.seed} --most {options.most} --burst {burst}"
        self.failures.append(f"burst {burst} ended its process: {why}\n    again: {again}")
        if self.restarts < MOST_RESTARTS and time.monotonic() - self.began < options.seconds:
            self.restarts += 1
            self.start(number, burst + options.processes)


def one(options: argparse.Namespace) -> Run:
    """One burst in this process, told call by call."""
    from soaking import Soak

    from liger_registry import registry

    run, soak = Run(options), Soak(registry, options.device, options.seed, options.most)
    pin = soak.pin

    def told(burst: Any, call: Any) -> None:
        pin(burst, call)
        print(call, flush=True)

    soak.pin = told  # type: ignore[method-assign]
    soak.burst(options.burst)
    run.counts, run.failures, run.bursts = soak.counts, soak.failures, 1
    return run


def table(counts: dict[str, Any]) -> list[str]:
    """The counts as lines: one an operation, and their sum."""
    lines = ["| operation | calls | results | shapes | implementations | beside | error | element | worst in |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    total = None
    for name, count in sorted(counts.items()):
        total = total or type(count)()
        total.merge(count)
        lines.append(_line(name, count))
    return [*lines, _line("all", total)] if total else lines


def _line(name: str, count: Any) -> str:
    numbers = (count.calls, count.results, len(count.shapes), len(count.implementations), count.together)
    cells = [name, *(f"{n:,}" for n in numbers), f"{count.norm.share:.3f}", f"{count.element.share:.3f}"]
    return f"| {' | '.join(cells)} | {count.norm.what}, {count.element.what} |"


def summary(run: Run) -> dict[str, Any]:
    """The report as data."""
    import torch

    options, seconds = run.options, time.monotonic() - run.began
    on_gpu = options.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "processes": options.processes,
        "most": options.most,
        "bursts": run.bursts,
        "calls": sum(c.calls for c in run.counts.values()),
        "results": sum(c.results for c in run.counts.values()),
        "turned_down": sum(c.turned_down for c in run.counts.values()),
        "resources": sum(c.resources for c in run.counts.values()),
        "memory_growth_mib": {name: value >> 20 for name, value in run.memory.items()},
        "failures": len(run.failures),
    }


def main(given: Sequence[str] | None = None) -> int:
    """Run, report, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="liger-registry-soak-") as directory:
        # What the user's own tables and pins say is not what is soaked; the processes inherit this.
        for name in [name for name in os.environ if name.startswith("LIGER_")]:
            del os.environ[name]
        os.environ["LIGER_TUNE_CACHE_DIR"] = directory
        options = complete(arguments(given))
        if options.burst is None:
            run = Run(options)
            run.all()
        else:
            run = one(options)
    for failure in run.failures:
        print(f"FAILED {failure}")
    print("\n".join(table(run.counts)))
    said = summary(run)
    print(json.dumps(said))
    if options.json is not None:
        counts = {name: count.to_json() for name, count in sorted(run.counts.items())}
        options.json.write_text(json.dumps({**said, "ops": counts, "failed": run.failures}, indent=1))
    return 1 if run.failures or not said["calls"] else 0


if __name__ == "__main__":
    sys.exit(main())
