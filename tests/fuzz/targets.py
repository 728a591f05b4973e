"""What is fuzzed: each target takes bytes and raises only if a promise is broken.

A check may meet errors of the catalogue, and nothing else. What a reader accepts must hold up afterwards: it is looked
up, merged, written and read again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from guarding import guarded

from liger_registry.cli import _archive
from liger_registry.config import Config, ConfigSpace, Fields
from liger_registry.device import Device
from liger_registry.digest import sealed
from liger_registry.document import parse, render
from liger_registry.errors import ConfigOutsideSpaceError, RegistryError
from liger_registry.plan import Plan
from liger_registry.problem import BACKWARD, FORWARD, SCHEME, Problem
from liger_registry.store import TableStore
from liger_registry.table import MAX_SAMPLES, STATUSES, Choice, Provenance, Sample, Stored, Table, diff

DEVICE = Device.parse("h200")
OP = "rms_norm"
CORPUS = Path(__file__).parent / "corpus"
SHIPPED = Path(__file__).parents[2] / "tuning_cache/liger_registry_tunings/v1/cuda/sm_90/h200-132/rms_norm.json"


def problem(rows: int = 512, phase: str = FORWARD, **flags: object) -> Problem:
    """A problem as tables hold them."""
    marks = {"needs": "weight,x", **flags} if phase != FORWARD else flags
    scheme = "" if phase == SCHEME else "default"
    return Problem(OP, scheme, phase, Fields(rows=rows, hidden=4096), Fields(x="bfloat16"), Fields(marks))


PROVENANCE = Provenance("3.6", "0123456789ab", "2.11.0", "570.1", "2026-01-02T03:04:05+00:00", "", "liger-registry 1")


def stored(rows: int = 512, phase: str = FORWARD, **flags: object) -> Stored:
    """A decision as tables hold them."""
    best, default = (Choice("cuda:row", Config(num_warps=n, fast=True, ratio=0.5)) for n in (4, 8))
    return Stored(problem(rows, phase, **flags), best, 9.5, default, 10.0, 0.01, "cuda-events-1", PROVENANCE)


def sample(status: str = "ok", warps: int = 4) -> Sample:
    """A sample as tables hold them."""
    time = 9.5 if status in ("ok", "noisy") else None
    choice = Choice("cuda:row", Config(num_warps=warps))
    return Sample(problem(), choice, status, time, 0, "" if time else "why", "cuda-events-1", PROVENANCE)


def table(*entries: Stored | Sample) -> Table:
    """A table of entries."""
    decisions = [entry for entry in entries if isinstance(entry, Stored)]
    samples = [entry for entry in entries if isinstance(entry, Sample)]
    return Table(DEVICE.directory, OP, DEVICE.to_json()).merged(decisions, samples)


def tables() -> list[Table]:
    """Small tables of every kind of entry."""
    shipped = parse(SHIPPED.read_bytes())
    few = Table(shipped.directory, shipped.op, shipped.device)
    few = few.merged(list(shipped.decisions.values())[:2], list(shipped.samples.values())[:2])
    return [
        table(stored()),
        table(sample()),
        table(stored(), stored(1024), stored(512, BACKWARD), stored(512, SCHEME, budget="1g"), sample()),
        table(*map(sample, STATUSES), stored()),
        Table(DEVICE.directory, OP, {}),
        few,
    ]


def seeds() -> list[bytes]:
    """Good documents, most of them small, because ten small ones find more in the same time than a large one.

    Those with a digest are few: it finds most damage before anything else looks.
    """
    plain = [render(of, seal=False).encode() for of in tables()]
    return [*plain, *plain[:2] * 12, render(tables()[0]).encode(), *exports()]


def exports() -> list[bytes]:
    """Good exports, with and without a digest."""
    bodies = [render(of, seal=False) for of in tables()[:2]]
    text = '{\n"export": 1,\n"tables": [\n' + ",\n".join(bodies) + "]}\n"
    return [text.encode(), sealed(text).encode()]


# -- tables ----------------------------------------------------------------------------------------------------------


class Tables:
    """The table reader, and what is done with what it accepts.

    Attributes:
        accepted: how many inputs were tables.
        partly: how many of them had entries that were left out.
        stores: how many went through a store's files.
        exports: how many went through the reader of ``import`` and ``merge``.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.path = TableStore(self.root).path(DEVICE, OP)
        self.path.parent.mkdir(parents=True)
        self.file = directory / "export.json"
        self.count = self.accepted = self.partly = self.stores = self.exports = 0

    def check(self, data: bytes) -> None:
        """Read one input; each 64th also as a file of a store, and each 64th as what is imported."""
        self.count += 1
        try:
            found = parse(data)
        except RegistryError:
            pass
        else:
            self.accepted += 1
            self.partly += bool(found.skipped)
            if self.accepted % 8 == 0:
                holds_up(found)
        if self.count % 64 == 0:
            self.as_file(data)
        elif self.count % 64 == 32:
            self.as_export(data)

    def as_file(self, data: bytes) -> None:
        """Through a store: loaded, and at times written to."""
        self.stores += 1
        for old in os.listdir(self.path.parent):
            os.unlink(self.path.parent / old)
        self.path.write_bytes(data)
        store = TableStore(self.root)
        with warnings.catch_warnings(), guarded(self.root):
            warnings.simplefilter("ignore")
            store.load(DEVICE, OP)
            if self.stores % 16 == 0:
                store.record(DEVICE, OP, [stored(2048)])
                assert stored(2048).key in store.load(DEVICE, OP).decisions

    def as_export(self, data: bytes) -> None:
        """As ``import`` and ``merge`` read it."""
        self.exports += 1
        self.file.write_bytes(data)
        with guarded():
            try:
                collected = _archive.collect(self.file)
            except RegistryError:
                return
            for of in _archive.combined(collected).values():
                assert not of.skipped
                holds_up(of)
                with suppress(RegistryError):
                    Device.from_json(of.device)


def holds_up(found: Table) -> None:
    """What was accepted answers, merges, and is the same after it was written and read."""
    again = parse(render(found))
    assert again == replace(found, skipped=())
    assert render(again) == render(found)
    assert TableStore("/nowhere").path(found.directory, found.op).is_relative_to("/nowhere/v1")
    for key, entry in found.decisions.items():
        assert found.decision(*key) is entry
        assert found.decision(key[0]) is not None
        assert found.nearest(key[0], ("rows", "a"), key[1])
        assert math.isfinite(entry.time_us)
        assert all(text.isprintable() for text in (str(entry.choice), key[0].text, key[1]))
    for line in diff(Table(found.directory, found.op), found):
        assert line.isprintable()
    for entry in found.samples.values():
        assert entry.status in STATUSES
        assert entry in found.samples_of(entry.problem)
    merged = found.merged(found.decisions.values(), found.samples.values())
    assert merged.decisions == found.decisions
    if len(found.samples) <= MAX_SAMPLES:
        assert merged.samples == found.samples


# -- everything else that reads -------------------------------------------------------------------------------------


def devices(data: bytes) -> None:
    """``Device.parse`` of any text, and ``Device.from_json`` of any JSON."""
    text = data.decode("utf-8", "surrogateescape")[:20_000]
    with warnings.catch_warnings(), guarded():
        warnings.simplefilter("ignore")
        # These look at the machine, and import torch.
        if not text.strip().lower().startswith(("cuda", "rocm", "cpu")):
            try:
                found = Device.parse(text)
            except RegistryError as error:
                if len(str(error)) > 4000:
                    raise AssertionError("an error repeats all that it was given") from error
            else:
                assert Device.from_json(json.loads(json.dumps(found.to_json()))) == found
                assert Device.parse(found.sku).directory == found.directory
    for value in _json(data):
        try:
            found = Device.from_json(value)
        except RegistryError:
            continue
        assert Device.from_json(found.to_json()) == found
        assert found.name.isprintable()


def problems(data: bytes) -> None:
    """``Problem.from_json`` of any JSON."""
    for value in _json(data):
        try:
            found = Problem.from_json(OP, value)
        except RegistryError:
            continue
        assert Problem.from_json(OP, found.to_json()) == found
        assert hash(found) == hash(Problem.from_json(OP, json.loads(json.dumps(found.to_json()))))


def plans(data: bytes) -> None:
    """``Plan.from_json`` of any JSON."""
    for value in _json(data):
        try:
            found = Plan.from_json(value)
        except RegistryError:
            continue
        assert Plan.from_json(found.to_json()).digest == found.digest


def spaces(data: bytes) -> None:
    """A config space of any values, and any fields parsed in it."""
    for value in _json(data):
        if not isinstance(value, dict):
            continue
        try:
            space = ConfigSpace(**value)
        except RegistryError:
            continue
        first = {name: values[0] for name, values in space.parameters.items()}
        assert space.parse(first) == Config(first)
        assert next(space.configs(problem(), DEVICE)) == Config(first)
        changed = dict.fromkeys(first, "no such value")
        if first and all("no such value" not in values for values in space.parameters.values()):
            try:
                space.parse(changed)
            except ConfigOutsideSpaceError:
                continue
            raise AssertionError("a value outside the space was accepted")


def _json(data: bytes) -> Iterator[object]:
    """Every mapping in a JSON text: the whole, and those inside."""
    try:
        queue = [json.loads(data.decode("utf-8", "replace"))]
    except (ValueError, RecursionError):
        return
    for value in queue:
        if len(queue) < 200:
            if isinstance(value, dict):
                queue += value.values()
            elif isinstance(value, list):
                queue += value
        yield value


Check = Callable[[bytes], None]


def target(name: str, directory: Path) -> Check:
    """The check of a target."""
    if name == "table":
        return Tables(directory).check
    return {"device": devices, "problem": problems, "plan": plans, "space": spaces}[name]


TARGETS = ("table", "device", "problem", "plan", "space")


def seeds_of(name: str) -> list[bytes]:
    """The good inputs of a target."""
    if name == "table":
        return seeds()
    if name == "device":
        names = ("h200", "a100-40", "sm_90-78u-64g", "gfx942-304u-192g", "interpreter:rocm", " MI300X ")
        return [*(text.encode() for text in names), json.dumps(DEVICE.to_json()).encode()]
    if name == "problem":
        return [json.dumps(problem(512, phase, needs="x").to_json()).encode() for phase in (FORWARD, BACKWARD, SCHEME)]
    if name == "plan":
        choices = {(DEVICE.fingerprint, problem(512, phase)): stored().choice for phase in (FORWARD, BACKWARD, SCHEME)}
        return [json.dumps(Plan(of).to_json()).encode() for of in (choices, {})]
    return [b'{"block_rows": [1, 2, 4], "num_warps": [4, 8], "mode": ["a", null, true, 0.5]}', b"{}"]


class Workplace:
    """A directory of its own, in memory where there is such a place."""

    def __enter__(self) -> Path:
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix="liger-registry-fuzz-", dir=place))
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
