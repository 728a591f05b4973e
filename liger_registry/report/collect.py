"""From a registry's tables and its log of misses to what a report says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_registry._version import __version__
from liger_registry.config import Config
from liger_registry.decision import CLUSTER, HITS, SHIPPED_TABLES, USER, Considered
from liger_registry.device import Device
from liger_registry.dispatch import Dispatcher
from liger_registry.errors import RegistryError
from liger_registry.problem import SCHEME, Problem
from liger_registry.report.data import UNUSABLE, Entry, Loser, Miss, Place, Report
from liger_registry.report.traffic import COPY_RATES, least_bytes
from liger_registry.table import OK, PARTLY, Choice, Sample, Stored, Table, order

if TYPE_CHECKING:
    from liger_registry.runtime import Registry
    from liger_registry.store import TableStore

# A page of a thousand problems stays under some megabytes.
MOST_LOSERS = 6
_ENDED = "the table's choice is not used"


def collect(
    registry: Registry,
    ops: Sequence[str] = (),
    devices: Sequence[str] = (),
    copy_rates: Mapping[str, float] | None = None,
) -> Report:
    """What the registry's tables and misses say now.

    Args:
        registry: the registry; it is asked, and nothing is recorded or tuned.
        ops: only these operations; all if none is named.
        devices: only these fingerprints; all if none is named.
        copy_rates: bytes a second by SKU, beside those that are known.
    """
    here = registry.device
    # Pins and a plan are of one process; a page is about the tables.
    dispatcher = Dispatcher(registry.catalog, registry.dispatcher.sources)
    asking = _Asking(registry, dispatcher, {**COPY_RATES, **(copy_rates or {})}, {here.fingerprint: here})
    tables = [
        (kind, store, table)
        for kind, store in registry.stores()
        for table in _tables(store)
        if (not ops or table.op in ops) and (not devices or "/".join(table.directory) in devices)
    ]
    entries = tuple(asking.entries(tables))
    wanted = [
        (place, problem)
        for place, problem in registry.misses.all()
        if (not ops or problem.op in ops) and (not devices or place in devices)
    ]
    measured = {e.op for e in entries if e.device == here.fingerprint}
    public = [op.name for op in registry.catalog.ops() if not (op.private or op.by_name)]
    return Report(
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=__version__,
        here=here.fingerprint,
        entries=entries,
        misses=tuple(asking.miss(place, problem) for place, problem in wanted),
        places=tuple(_places(tables)),
        untuned=tuple(n for n in public if n not in measured and (not ops or n in ops)) if not devices else (),
        faults=tuple(_faults(registry, tables)),
    )


def _tables(store: TableStore) -> Iterator[Table]:
    for directory in store.devices():
        for op in store.ops(directory):
            table = store.load(directory, op)
            if table or table.skipped:
                yield table


class _Asking:
    """Asks the tiers for problems of devices that need not be here."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        copy_rates: Mapping[str, float],
        devices: dict[str, Device],
    ) -> None:
        self.registry, self.dispatcher, self.copy_rates, self.devices = registry, dispatcher, copy_rates, devices
        self.known = {op.name: op for op in registry.catalog.ops()}

    def entries(self, tables: Iterable[tuple[str, TableStore, Table]]) -> Iterator[Entry]:
        """One for each problem of each device, whatever number of stores hold it."""
        groups: dict[tuple[str, str], list[tuple[str, Table]]] = {}
        for kind, _, table in tables:
            groups.setdefault(("/".join(table.directory), table.op), []).append((kind, table))
        for (fingerprint, _), found in sorted(groups.items()):
            device = self._device(fingerprint, [table for _, table in found])
            problems = dict.fromkeys(problem for _, table in found for problem in table.problems)
            for problem in sorted(problems, key=order):
                yield self._entry(fingerprint, device, problem, found)

    def miss(self, fingerprint: str, problem: Problem) -> Miss:
        """A recorded miss and what answers it now."""
        device = self.devices.get(fingerprint)
        choice, source, _ = self._answer(device, problem, [])
        name = choice.implementation if choice else ""
        return Miss(fingerprint, problem.text, problem.op, source, name, source in HITS)

    def _device(self, fingerprint: str, tables: Sequence[Table]) -> Device | None:
        """The device that tables are for, as they describe it; None if what they say is no such device."""
        for table in tables:
            if fingerprint not in self.devices:
                try:
                    device = Device.from_json(table.device)
                except RegistryError:
                    continue
                if device.fingerprint == fingerprint:
                    self.devices[fingerprint] = device
        return self.devices.get(fingerprint)

    def _answer(
        self, device: Device | None, problem: Problem, trace: list[Considered]
    ) -> tuple[Choice | None, str, str]:
        """Choice, source and detail of what a call of this problem gets now."""
        op = self.known.get(problem.op)
        if device is None:
            return None, UNUSABLE, "the table does not describe its device"
        if op is None:
            return None, UNUSABLE, f"no operation {problem.op} is registered"
        if not op.has(problem):
            return None, UNUSABLE, "no call of this version is such a problem"
        terms = self.registry.terms(budget=problem.flags.get("budget", self.registry.settings.memory_budget))  # type: ignore[arg-type]
        found: Any
        try:
            if problem.phase == SCHEME:
                found = self.dispatcher.decide_scheme(problem, device, trace)
            else:
                found = self.dispatcher.decide(problem, device, terms, trace)
        except RegistryError as error:
            return None, UNUSABLE, error.what
        return found.choice, found.source, found.detail

    def _entry(
        self, fingerprint: str, device: Device | None, problem: Problem, tables: Sequence[tuple[str, Table]]
    ) -> Entry:
        trace: list[Considered] = []
        choice, source, detail = self._answer(device, problem, trace)
        protocol = None if device is None else device.protocol
        held = [(kind, table, s) for kind, table in tables if (s := table.decision(problem, protocol))]
        held = held or [(kind, table, s) for kind, table in tables if (s := table.decision(problem))]
        # The table that the answer came from; what another one holds was measured too.
        kind, table, stored = next((h for h in held if h[2].choice == choice), held[0])
        if choice is not None and choice != stored.choice:
            refused = [c.reason for c in trace if not c.accepted and c.choice == str(stored.choice)]
            detail = "; ".join(filter(None, (detail, f"{_ENDED}: {refused[0]}" if refused else _ENDED)))
        samples = [s for s in table.samples_of(problem, stored.protocol) if s.choice != (choice or stored.choice)]
        shown = choice or stored.choice
        usable = source != UNUSABLE
        provenance = stored.provenance
        if stale := self.dispatcher.staleness(stored) if usable else "":
            detail = detail.replace(stale, "").strip(" ,;")
        return Entry(
            device=fingerprint,
            op=problem.op,
            scheme="" if problem.scheme == "default" else problem.scheme,
            phase=problem.phase,
            sizes=_fields(problem.dims),
            dtypes=_dtypes(problem.dtypes),
            flags=_fields(problem.flags),
            implementation=shown.implementation,
            config=tuple((name, str(value)) for name, value in shown.config.items()),
            source=source,
            detail=f"{detail} table" if detail in (USER, CLUSTER, SHIPPED_TABLES) else detail,
            stale=stale,
            time_us=_time(table, stored, shown),
            default=str(stored.default),
            default_us=stored.default_us or None,
            noise=stored.noise,
            bytes=least_bytes(self.registry.catalog, self.known[problem.op], problem) if usable else None,
            copy_rate=self.copy_rates.get(device.sku) if device else None,
            store=kind,
            date=provenance.date,
            versions=tuple(
                (name, value)
                for name, value in (
                    ("Triton", provenance.triton),
                    ("torch", provenance.torch),
                    ("driver", provenance.driver),
                    ("clocks", provenance.clocks),
                    ("package", provenance.package),
                    ("source", provenance.source),
                    ("protocol", stored.protocol),
                )
                if value
            ),
            losers=tuple(_loser(sample, shown) for sample in sorted(samples, key=_slowness)[:MOST_LOSERS]),
            more=max(0, len(samples) - MOST_LOSERS),
        )


def _time(table: Table, stored: Stored, choice: Choice) -> float | None:
    """The measured time of a choice: the decision's own, else that of its sample."""
    if choice == stored.choice:
        return stored.time_us or None
    return next((s.time_us for s in table.samples_of(stored.problem, stored.protocol) if s.choice == choice), None)


def _slowness(sample: Sample) -> tuple[bool, float, str]:
    return sample.time_us is None, sample.time_us or 0.0, str(sample.choice)


def _loser(sample: Sample, chosen: Choice) -> Loser:
    """A sample; of another config of the chosen implementation it tells what differs, the rest is read above it."""
    choice, config = sample.choice, dict(sample.choice.config)
    if choice.implementation == chosen.implementation:
        config = {name: value for name, value in config.items() if value != chosen.config.get(name)}
    detail = "" if sample.detail == PARTLY else sample.detail
    status = "slower" if sample.status == OK else sample.status
    return Loser(choice.implementation, _fields(config), status, sample.time_us, detail)


def _fields(fields: Mapping[str, object] | Config) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _dtypes(dtypes: Mapping[str, object]) -> str:
    """``bfloat16`` where all tensors that are there have it, else each by name."""
    present = {str(dtype) for dtype in dtypes.values() if dtype != "none"}
    if len(present) != 1:
        return _fields(dtypes)
    return ", ".join([*present, *(f"no {name}" for name, dtype in dtypes.items() if dtype == "none")])


def _places(tables: Iterable[tuple[str, TableStore, Table]]) -> Iterator[Place]:
    groups: dict[tuple[str, str, str], list[Table]] = {}
    for kind, store, table in tables:
        groups.setdefault(("/".join(table.directory), kind, str(store.root)), []).append(table)
    for (device, kind, root), found in sorted(groups.items()):
        dates = sorted(s.provenance.date for table in found for s in table.decisions.values() if s.provenance.date)
        names = [str(table.device.get("name", "")) for table in found]
        counts = sum(len(t.decisions) for t in found), sum(len(t.samples) for t in found)
        yield Place(
            device, next(filter(None, names), ""), kind, root, *counts, *((dates[0], dates[-1]) if dates else ("", ""))
        )


def _faults(registry: Registry, tables: Iterable[tuple[str, TableStore, Table]]) -> Iterator[str]:
    for _, store, table in tables:
        if table.skipped:
            path = store.path(table.directory, table.op)
            yield f"{len(table.skipped)} entries of {path} are left out, the first: {table.skipped[0]}"
    for _, store in registry.stores():
        if Path(store.root).is_dir():
            yield from (f"set aside, no table: {path}" for path in sorted(Path(store.root).rglob("*.bad*")))
    for record in registry.plugins():
        if record.status == "failed":
            yield f"plugin {record.name} of {record.distribution} failed: {record.reason}"
