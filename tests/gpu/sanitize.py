"""Runs small calls of every implementation under NVIDIA's compute-sanitizer, and says what it reports.

``python -m tests.gpu.sanitize`` looks for the tool on PATH, in /usr/local/cuda/bin and in the wheel
``nvidia-cuda-sanitizer-api``. memcheck finds accesses outside of what is allocated, racecheck programs whose threads
race for shared memory; races for global memory are what ``test_races`` and the soak look for. First both have to find
faults that are planted. Where the tool is missing, or the device turns it down, the report says NOT RUN.

Exit code 1 if anything was reported, a result was wrong, or a planted fault was not found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck")
#: What each tool has to find: without it the tool's silence says nothing.
PLANTED = {"memcheck": "beyond", "racecheck": "race"}
CLEAN, REPORTED, FAILED, NOT_RUN = "clean", "REPORTED", "FAILED", "NOT RUN"
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", re.MULTILINE)
# Of what the tool says where it cannot look at a device at all.
_TURNED_DOWN = re.compile(r"^=+ .*(device not supported|not supported|unable to|failed to initialize).*$", re.I | re.M)


@dataclass
class Outcome:
    """What one process found.

    Attributes:
        tool, what: which tool looked at what.
        status: one of ``clean``, ``REPORTED``, ``FAILED`` and ``NOT RUN``.
        calls: how many ran under it.
        errors: how many it counted; None if it gave no summary.
        detail: the first report, or why there is none.
        seconds: how long it took.
    """

    tool: str
    what: str
    status: str
    calls: int = 0
    errors: int | None = None
    detail: str = ""
    seconds: float = 0.0


def find() -> str | None:
    """Where the tool is."""
    places = [shutil.which("compute-sanitizer") or "", "/usr/local/cuda/bin/compute-sanitizer"]
    for root in map(Path, sys.path):
        places += map(str, sorted(root.glob("nvidia/*/bin/compute-sanitizer")))
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def read(tool: str, what: str, output: str, code: int) -> Outcome:
    """What a process's output says."""
    summaries = [int(number) for number in _SUMMARY.findall(output)]
    last = [line for line in output.splitlines() if line.startswith("SANITIZED ")]
    said = json.loads(last[-1].partition(" ")[2]) if last else {"calls": 0, "wrong": []}
    errors = sum(summaries) if summaries else None
    outcome = Outcome(tool, what, CLEAN, said["calls"], errors)
    lines = [line for line in output.splitlines() if line.strip()]
    reports = [line for line in lines if line.startswith("=========")]
    if (refusal := _TURNED_DOWN.search(output)) and (not last or not said["calls"]):
        outcome.status, outcome.detail = NOT_RUN, refusal.group().strip("= ")
    elif errors is None:
        outcome.status, outcome.detail = NOT_RUN if not last else FAILED, f"no summary: {' / '.join(lines[-3:])[-400:]}"
    elif errors:
        outcome.status, outcome.detail = REPORTED, "\n".join(reports[1:25])
    elif not last:
        outcome.status, outcome.detail = FAILED, f"exit code {code}: {' / '.join(lines[-6:])[-900:]}"
    elif said["wrong"]:
        outcome.status, outcome.detail = FAILED, "\n".join(said["wrong"])
    elif not said["calls"]:
        outcome.status, outcome.detail = NOT_RUN, "nothing here is for this device"
    elif said.get("left"):
        outcome.status, outcome.detail = NOT_RUN, f"no time was left for {', '.join(said['left'])}"
    return outcome


def check(command: str, tool: str, what: str, names: Sequence[str], limit_s: float) -> Outcome:
    """One process under one tool."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    # It stops by itself, since one that is killed says nothing of what it did.
    child = [sys.executable, str(HERE / "sanitized.py"), what, ",".join(names), str(limit_s * 0.8)]
    options = ["--tool", tool, "--target-processes", "application-only", "--print-limit", "20"]
    began, label = time.monotonic(), ",".join(names) or what
    try:
        done = subprocess.run(
            [command, *options, *child], capture_output=True, text=True, timeout=limit_s, env=environment,
            cwd=HERE.parents[1], errors="replace",
        )  # fmt: skip
        outcome = read(tool, label, done.stdout + "\n" + done.stderr, done.returncode)
    except OSError as error:
        outcome = Outcome(tool, label, NOT_RUN, detail=str(error))
    except subprocess.TimeoutExpired:
        outcome = Outcome(tool, label, FAILED, detail=f"took more than {limit_s:.0f} s")
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def groups(names: Sequence[str], count: int) -> list[list[str]]:
    """The operations in so many groups, neighbours apart."""
    return [list(names[n::count]) for n in range(min(count, len(names)))]


def planted(command: str, tool: str, limit_s: float) -> Outcome:
    """Whether a tool finds what it has to."""
    found = check(command, tool, PLANTED.get(tool, "beyond"), (), limit_s)
    if found.status == REPORTED:
        return Outcome(tool, "planted fault", CLEAN, 1, 0, f"found: {found.errors}", found.seconds)
    if found.status != NOT_RUN:
        found.status, found.detail = FAILED, f"it did not find what was planted; {found.detail}"
    found.what = "planted fault"
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run, report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="of memcheck, racecheck, initcheck and synccheck")
    parser.add_argument("--ops", default="", help="some operations alone; all by default")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=250.0, help="for one process")
    parser.add_argument("--json", type=Path, default=None, help="also write the report to a file")
    options = parser.parse_args(given)
    command = find()
    if command is None:
        print("NOT RUN: there is no compute-sanitizer; it comes with CUDA, and as nvidia-cuda-sanitizer-api from PyPI")
        return _report([Outcome(tool, "all", NOT_RUN, detail="no compute-sanitizer") for tool in TOOLS], options.json)
    names = options.ops.split(",") if options.ops else _operations()
    outcomes: list[Outcome] = []
    for tool in options.tools.split(","):
        first = planted(command, tool, options.limit_s)
        outcomes.append(first)
        print(_line(first), flush=True)
        if first.status != CLEAN:
            continue  # its silence would say nothing
        with ThreadPoolExecutor(options.jobs) as pool:
            parts = groups(names, options.jobs)
            for run in [pool.submit(check, command, tool, "conform", part, options.limit_s) for part in parts]:
                outcomes.append(run.result())
                print(_line(outcomes[-1]), flush=True)
    return _report(outcomes, options.json)


def _operations() -> list[str]:
    from liger_registry import registry

    return [op.name for op in registry.catalog.ops()]


def _line(outcome: Outcome) -> str:
    numbers = f"{outcome.calls} calls, {outcome.seconds} s"
    return f"{outcome.status} {outcome.tool} {outcome.what}: {numbers}{f'; {outcome.detail}' if outcome.detail else ''}"


def _report(outcomes: Sequence[Outcome], file: Path | None) -> int:
    counts = {status: sum(o.status == status for o in outcomes) for status in (CLEAN, REPORTED, FAILED, NOT_RUN)}
    print(json.dumps({"calls": sum(o.calls for o in outcomes), **counts}))
    if file is not None:
        file.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return int(bool(counts[REPORTED] or counts[FAILED]))


if __name__ == "__main__":
    sys.exit(main())
