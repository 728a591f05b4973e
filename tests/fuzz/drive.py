"""Fuzzes a reader with as many inputs as are asked for, in several processes, and counts truthfully.

``python -m tests.fuzz.drive --inputs 10000000 --seed 1`` checks the table reader; ``--target`` names another. Each
process draws from a generator of its own, so that a seed and a number of processes give the same inputs again. What
breaks a promise is written to ``--failures`` and ends the run with exit code 1; once mended, such a file belongs into
``corpus/``, which the tests replay. An interrupted run prints what it had done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import targets
from guarding import guarded
from mutating import Mutator

BATCH = 512
# One batch takes a tenth of a second; one input that takes a minute hangs.
HANG_S = 60
MOST_GROWTH_KIB = 256 << 10


class HangError(BaseException):
    """An input keeps a reader busy; no ``except Exception`` hides it."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.drive", description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other inputs")
    parser.add_argument("--target", choices=targets.TARGETS, default="table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that time, whatever is left")
    parser.add_argument("--report-s", type=float, default=30.0, help="between two lines of progress")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where failing inputs are kept")
    return parser.parse_args(given)


def work(number: int, share: int, options: argparse.Namespace, reports: Any) -> None:
    """One process: makes and checks its share of the inputs, and reports after each few batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run
    signal.signal(signal.SIGALRM, _hangs)
    data, done, ended = b"", 0, time.monotonic() + options.seconds
    with targets.Workplace() as place:
        check = targets.target(options.target, place)
        counters = getattr(check, "__self__", None)
        maker = Mutator(targets.seeds_of(options.target), Random(f"{options.seed}/{number}/{options.target}"))
        for seed in maker.seeds:
            check(seed)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            while done < share and time.monotonic() < ended:
                signal.setitimer(signal.ITIMER_REAL, HANG_S)
                with guarded(place):
                    for _ in range(min(BATCH, share - done)):
                        data = maker.make()
                        check(data)
                        done += 1
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
                if grown > MOST_GROWTH_KIB:
                    raise MemoryError(f"this process grew by {grown >> 10} MiB")
                if done % (BATCH * 16) == 0:
                    reports.put({"worker": number, "done": done, "mib": grown >> 10, **_counts(counters)})
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            text = "".join(traceback.format_exception(error))[-4000:]
            reports.put({"worker": number, "done": done, "failed": text, "input": data.hex(), **_counts(counters)})
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        reports.put({"worker": number, "done": done, "mib": grown >> 10, "ended": True, **_counts(counters)})


def _hangs(*_: object) -> None:
    raise HangError(f"a batch of {BATCH} inputs took more than {HANG_S} s")


def _counts(counters: object) -> dict[str, int]:
    return {name: getattr(counters, name) for name in ("accepted", "partly", "stores", "exports") if counters}


def main(given: Sequence[str] | None = None) -> int:
    """Run, print what was done, and return the exit code."""
    options = arguments(given)
    start, context = time.monotonic(), multiprocessing.get_context("fork")
    reports: Any = context.Queue()
    shares = [
        options.inputs // options.processes + (n < options.inputs % options.processes) for n in range(options.processes)
    ]
    workers = [
        context.Process(target=work, args=(n, share, options, reports), daemon=True) for n, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    latest: dict[int, dict[str, Any]] = {}
    ended, interrupted, last = set[int](), False, start
    try:
        while len(ended) < len(workers):
            try:
                report = reports.get(timeout=1.0)
            except Empty:
                # A process that is gone without a word was killed by what it was at.
                for n in {n for n, w in enumerate(workers) if not w.is_alive()} - ended:
                    if reports.empty():
                        latest[n] = {**latest.get(n, {"done": 0}), "failed": f"exit code {workers[n].exitcode}"}
                        ended.add(n)
                continue
            latest[report["worker"]] = report
            if "failed" in report or "ended" in report:
                ended.add(report["worker"])
            if time.monotonic() - last > options.report_s:
                last = time.monotonic()
                print(json.dumps(_summary(options, latest, last - start)), flush=True)
    except KeyboardInterrupt:
        interrupted = True
        for worker in workers:
            worker.terminate()
    summary = _summary(options, latest, time.monotonic() - start)
    failures = [report for report in latest.values() if "failed" in report]
    for report in failures:
        print(report["failed"], file=sys.stderr)
        data = bytes.fromhex(report.get("input", ""))
        options.failures.mkdir(parents=True, exist_ok=True)
        file = options.failures / f"{options.target}-{hashlib.sha256(data).hexdigest()[:12]}"
        file.write_bytes(data)
        print(f"the input is kept as {file}", file=sys.stderr)
    print(json.dumps({**summary, "finished": not (failures or interrupted), "failures": len(failures)}), flush=True)
    return 1 if failures else 130 if interrupted else 0


def _summary(options: argparse.Namespace, latest: dict[int, dict[str, Any]], seconds: float) -> dict[str, Any]:
    done = sum(report["done"] for report in latest.values())
    names = ("accepted", "partly", "stores", "exports")
    return {
        "target": options.target,
        "seed": options.seed,
        "inputs": done,
        **{name: sum(report.get(name, 0) for report in latest.values()) for name in names},
        "most_grown_mib": max((report.get("mib", 0) for report in latest.values()), default=0),
        "seconds": round(seconds, 1),
        "per_second": round(done / seconds) if seconds else 0,
    }


if __name__ == "__main__":
    sys.exit(main())
