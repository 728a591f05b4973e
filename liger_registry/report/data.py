"""What a report says, as plain data: texts and numbers that a page, a chart or a test can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

#: The source of an entry that no call would be answered by.
UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True)
class Loser:
    """A candidate that was tried and not chosen.

    Attributes:
        implementation: its id.
        config: its config as text; of the chosen implementation only what differs from the choice.
        status: how its trial ended.
        time_us: its time in microseconds; None if it was not timed.
        detail: why it failed.
    """

    implementation: str
    config: str
    status: str
    time_us: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One problem on one device, what it is served by, and how that is known.

    Attributes:
        device: the device's fingerprint.
        op: the operation.
        scheme: the scheme; empty where an operation has one only.
        phase: ``forward``, ``backward`` or ``scheme``.
        sizes: the dims as text.
        dtypes: the dtypes as text.
        flags: the flags as text.
        implementation: what a call gets now; empty where nothing could say.
        config: its config, as name and value.
        source: the tier that answers a call now, or ``unusable``.
        detail: what of that tier, or why nothing of the table is used.
        stale: what has changed since the measurement.
        time_us: the measured time of what is chosen.
        default: the heuristic's implementation and config as text.
        default_us: its time in microseconds.
        noise: the relative noise seen.
        bytes: the bytes that have to be moved at least; None for operations with matrix products inside.
        copy_rate: the device's copy rate in bytes a second; None where it is not known.
        store: which store holds the measurement.
        date: when it was measured.
        versions: Triton, torch, driver, clocks and package, as name and value.
        losers: the other candidates, the fastest first.
        more: how many others there are beyond ``losers``.
    """

    device: str
    op: str
    scheme: str
    phase: str
    sizes: str
    dtypes: str
    flags: str
    implementation: str
    config: tuple[tuple[str, str], ...]
    source: str
    detail: str
    stale: str
    time_us: float | None
    default: str
    default_us: float | None
    noise: float
    bytes: int | None
    copy_rate: float | None
    store: str
    date: str
    versions: tuple[tuple[str, str], ...]
    losers: tuple[Loser, ...]
    more: int

    @property
    def chosen(self) -> str:
        """The choice as one text, as ``default`` has it."""
        return f"{self.implementation}({','.join(f'{name}={value}' for name, value in self.config)})"

    @property
    def tuned(self) -> bool:
        """Whether something other than the default was chosen."""
        return self.chosen != self.default

    @property
    def gain(self) -> float | None:
        """The default's time over the chosen one's."""
        return self.default_us / self.time_us if self.default_us and self.time_us else None

    @property
    def rate(self) -> float | None:
        """The bytes that have to be moved over the time, in bytes a second."""
        return self.bytes / self.time_us * 1e6 if self.bytes and self.time_us else None

    @property
    def bound_us(self) -> float | None:
        """The time that the memory alone takes, in microseconds."""
        return self.bytes / self.copy_rate * 1e6 if self.bytes and self.copy_rate else None

    @property
    def share(self) -> float | None:
        """Bound over time; above 1 where a cache held part of the tensors."""
        return self.bound_us / self.time_us if self.bound_us and self.time_us else None


@dataclass(frozen=True, slots=True)
class Miss:
    """A problem that a run asked for.

    Attributes:
        device: the device's fingerprint.
        problem: the problem as text.
        op: the operation.
        source: what answers it now.
        implementation: the implementation that serves it now.
        solved: whether a table has come to answer it exactly.
    """

    device: str
    problem: str
    op: str
    source: str
    implementation: str
    solved: bool


@dataclass(frozen=True, slots=True)
class Place:
    """The tables of one device in one store.

    Attributes:
        device: the device's fingerprint.
        name: what its vendor calls it.
        store: ``user``, ``cluster`` or ``shipped``.
        root: where the store is.
        decisions: how many there are.
        samples: how many there are.
        first: the date of the oldest decision.
        last: the date of the newest decision.
    """

    device: str
    name: str
    store: str
    root: str
    decisions: int
    samples: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that a page shows.

    Attributes:
        made: when, in ISO 8601 and UTC.
        version: of this package.
        here: the fingerprint of the device at hand.
        entries: one a problem and device.
        misses: what runs asked for.
        places: where the tables are.
        untuned: operations without any measurement on the device at hand.
        faults: files set aside, entries left out, plugins that failed.
    """

    made: str
    version: str
    here: str
    entries: tuple[Entry, ...]
    misses: tuple[Miss, ...]
    places: tuple[Place, ...]
    untuned: tuple[str, ...] = ()
    faults: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that entries or misses are about, in order."""
        return tuple(sorted({*(e.device for e in self.entries), *(m.device for m in self.misses)}))

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations that entries or misses are about, in order."""
        return tuple(sorted({*(e.op for e in self.entries), *(m.op for m in self.misses)}))

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the entries, in order."""
        return tuple(sorted({e.source for e in self.entries}))

    @property
    def stale(self) -> tuple[Entry, ...]:
        """The entries whose measurement is out of date."""
        return tuple(e for e in self.entries if e.stale)

    @property
    def unusable(self) -> tuple[Entry, ...]:
        """The entries that no call is answered by."""
        return tuple(e for e in self.entries if e.source == UNUSABLE)

    @property
    def missing(self) -> tuple[Miss, ...]:
        """The misses that no table answers yet."""
        return tuple(m for m in self.misses if not m.solved)

    @property
    def missed(self) -> tuple[tuple[Miss, ...], ...]:
        """The misses of each operation and device, those that no table answers first."""
        groups: dict[tuple[str, str], list[Miss]] = {}
        for miss in sorted(self.misses, key=lambda m: (m.op, m.device, m.solved, m.problem)):
            groups.setdefault((miss.op, miss.device), []).append(miss)
        return tuple(map(tuple, groups.values()))

    @property
    def tuned(self) -> tuple[Entry, ...]:
        """The entries where measuring changed the choice."""
        return tuple(e for e in self.entries if e.tuned and e.gain)

    @property
    def median_gain(self) -> float | None:
        """The median gain where measuring changed the choice."""
        return median(gains) if (gains := [e.gain for e in self.tuned if e.gain]) else None

    @property
    def median_share(self) -> float | None:
        """The median share of the bound, where that is known."""
        return median(shares) if (shares := [e.share for e in self.entries if e.share]) else None
