"""Registries over made-up tables and misses, for tests of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from liger_registry.config import Config, Fields
from liger_registry.device import Device
from liger_registry.implementation import source_hash
from liger_registry.problem import Problem
from liger_registry.runtime import Registry
from liger_registry.settings import Settings
from liger_registry.store import TableStore
from liger_registry.table import Choice, Provenance, Sample, Stored

EAGER, FUNCTIONAL = Choice("any:eager", Config()), Choice("any:functional", Config())


def problem(rows: int = 64, **flags: Any) -> Problem:
    dtypes = Fields(x="float32", weight="float32")
    return Problem(
        "rms_norm", "default", "forward", Fields(rows=rows, hidden=256), dtypes, Fields(casting="llama", **flags)
    )


def stored(registry: Registry, rows: int, time_us: float, default_us: float, **changes: Any) -> Stored:
    launch = registry.catalog.find("rms_norm", "default", "forward", "any:functional").launch
    provenance = Provenance(
        "none", source_hash(launch), "2.13.0", "", "2026-01-02T03:04:05+00:00", "", "liger-registry 1"
    )
    found = Stored(problem(rows), FUNCTIONAL, time_us, EAGER, default_us, 0.011, "cpu-clock-1", provenance)
    return replace(found, **changes)


def filled(cache: Path) -> Registry:
    """A registry over a cache with three decisions, one of them stale, samples, and misses old and new."""
    registry = Registry(Settings(cache_dir=cache))
    device = Device.parse("cpu")
    good = [stored(registry, 64, 10.0, 25.0), stored(registry, 128, 20.0, 21.0)]
    old = stored(registry, 256, 40.0, 40.0, default=FUNCTIONAL)
    old = replace(old, provenance=replace(old.provenance, source="0" * 12))
    samples = [
        Sample(problem(64), EAGER, "ok", 25.0, 0, "", "cpu-clock-1", old.provenance),
        Sample(problem(64), FUNCTIONAL, "ok", 10.0, 0, "", "cpu-clock-1", old.provenance),
        Sample(
            problem(64),
            Choice("cpu:row_chunks", Config(slab_rows=64)),
            "wrong",
            None,
            None,
            "off by one",
            "cpu-clock-1",
            old.provenance,
        ),
    ]
    TableStore(cache).record(device, "rms_norm", [*good, old], samples)
    registry.misses.add(device.fingerprint, problem(64))
    registry.misses.add(device.fingerprint, problem(4096))
    return registry


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}'</style>"


def hostile(tmp_path: Path) -> Registry:
    """A registry over a table that says HOSTILE wherever a table may say what it likes, and misses that do."""
    cache = tmp_path / "cache"
    registry = filled(cache)
    bad = HOSTILE
    found = stored(registry, 1024, 5.0, 9.0)
    odd = replace(
        found.problem,
        dtypes=Fields(x=bad, weight="float32"),
        flags=Fields(casting=bad, rest=bad),
    )
    provenance = Provenance(*[bad] * 7)
    choice = Choice(bad, Config(num_warps=bad))
    entries = [
        replace(found, problem=odd, choice=choice, default=choice, provenance=provenance),
        replace(found, default=choice, provenance=replace(provenance, source=found.provenance.source)),
    ]
    sample = Sample(found.problem, choice, "error", None, None, bad, "cpu-clock-1", provenance)
    device = replace(Device.parse("cpu"), name=bad)
    TableStore(cache).record(device, "rms_norm", entries, [sample])
    with (cache / "misses.jsonl").open("a") as file:
        file.write(json.dumps({"device": bad, "op": bad, **odd.to_json()}) + "\n")
    return Registry(Settings(cache_dir=cache))
