"""One process of the storage tests: ``python storage_child.py '<json>'``.

A writer records one entry after another and acknowledges each that is on the disk; a reader looks again and again and
exits with an error once something that was there is gone or does not parse. No torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import shim

from liger_registry import store as stores
from liger_registry.config import Config, Fields
from liger_registry.document import parse
from liger_registry.errors import TableWarning
from liger_registry.misses import MissLog
from liger_registry.problem import Problem
from liger_registry.store import TableStore
from liger_registry.table import Choice, Provenance, Sample, Stored

OPS = ("rms_norm", "swiglu", "rope")
CHOICE = Choice("cuda:persistent", Config(block_rows=4))
_write = os.write  # the shim's would let an acknowledgement fail


class Place:
    directory = ("cuda", "sm_90", "h200-132")

    def to_json(self):
        return {"vendor": "cuda", "sku": "h200"}


def problem(op: str, rows: int) -> Problem:
    return Problem(op, "default", "forward", Fields(hidden=4096, rows=rows), Fields(x="bfloat16"), Fields())


def entries(op: str, rows: int) -> tuple[Stored, Sample]:
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(0, min(time.time(), 1e11))))
    rest = ("cuda-events-1", Provenance("3.6", "0123456789ab", date=date))
    wanted = problem(op, rows)
    return Stored(wanted, CHOICE, 1.0, CHOICE, 1.0, 0.0, *rest), Sample(wanted, CHOICE, "ok", 1.0, 0, "", *rest)


def say(*words: object) -> None:
    _write(1, (" ".join(map(str, words)) + "\n").encode())


def write(asked: dict) -> None:
    """Record rows from ``first`` on until the time or the count is up; the last one without faults."""
    log = MissLog(Path(asked["root"]) / "misses.jsonl")
    store = TableStore(asked["root"], lock_timeout_s=asked.get("lock_timeout_s", 20.0))
    faults = None
    if asked.get("plan"):
        faults = shim.Faults(asked["plan"], asked.get("chance", 0.3), asked["first"], asked["root"])
        faults.install()
    end, longest = time.monotonic() + asked.get("seconds", 1e9), 0.0
    kept: list[tuple[str, int]] = []
    count = asked.get("count", 1 << 30)
    for number in range(count):
        last = number == count - 1 or time.monotonic() > end
        if last and faults is not None and not asked.get("to_the_end"):
            faults.on = False
        op, rows = (OPS[0] if last else OPS[number % len(asked.get("ops", OPS))]), asked["first"] + number
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stores._warned.clear()  # each failure is told, not the first alone
            decision, sample = entries(op, rows)
            store.record(Place(), op, [decision], [sample])
        longest = max(longest, time.monotonic() - began)
        assert all(w.category is TableWarning for w in caught), [str(w.message) for w in caught]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if faults is not None and faults.on else "error")
            while not (there := store.load(Place(), op)) and faults is not None:
                pass  # a look that fails is a miss; the next one may find it
        assert there.decision(problem(op, rows)) == decision, "what was recorded is not answered"
        if any("stay in memory" in str(w.message) for w in caught):
            kept.append((op, rows))
            say("kept", op, rows)
        else:
            for name, row in [k for k in kept if k[0] == op] + [(op, rows)]:
                say("ack", name, row)
            kept = [k for k in kept if k[0] != op]
        if asked.get("misses") and number % 7 == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                log._warned = False
                log.add("cuda/sm_90/h200-132", problem("rope", rows))
            if not caught:
                say("miss", "rope", rows)
        if last:
            break
    for op in {name for name, _ in kept} if not asked.get("to_the_end") else ():
        rows = asked["first"] + count + OPS.index(op)
        if not written_at_last(store, op, entries(op, rows)[0]):
            continue  # nothing of it is acknowledged, which is all that it may be
        for name, row in kept:
            if name == op:
                say("ack", name, row)
    if faults is not None:
        say("faults", faults.count)
    say("longest", f"{longest:.3f}")


def written_at_last(store: TableStore, op: str, entry: Stored, tries: int = 3) -> bool:
    """Record one more entry; where all end at the same time on a busy machine, a lock's time limit may pass first."""
    for _ in range(tries):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stores._warned.clear()
            store.record(Place(), op, [entry])
        if not caught:
            return True
    return False


def read(asked: dict) -> None:
    """Load and parse until the time is up; entries only ever come."""
    store, end, looks = TableStore(asked["root"]), time.monotonic() + asked["seconds"], 0
    warnings.simplefilter("error")
    seen: dict[str, set] = {op: set() for op in OPS}
    while time.monotonic() < end:
        for op in OPS:
            table = store.load(Place(), op)
            assert not table.skipped, table.skipped[:3]
            gone = seen[op] - table.decisions.keys()
            assert not gone, f"{len(gone)} entries of {op} are gone"
            seen[op] = set(table.decisions)
            path = store.path(Place(), op)
            if path.exists():
                assert not parse(path.read_bytes(), Place.directory, op).skipped
        looks += 1
    say("looks", looks)


def main() -> None:
    asked = json.loads(sys.argv[1])
    if "clock" in asked:
        shim.clock(asked["clock"], asked.get("first", 0))
    say("started")
    {"write": write, "read": read}[asked["role"]](asked)
    assert not {"torch", "triton"} & set(sys.modules)


if __name__ == "__main__":
    main()
