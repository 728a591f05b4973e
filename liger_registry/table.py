"""Tables: the decisions and samples persisted for one device and operation.

A ``Table`` is a value: it answers questions and merges into new tables, and never changes. ``document`` turns it into
JSON and back, ``store`` keeps it in files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from liger_registry.config import Config
from liger_registry.problem import Problem

OK, NOISY, WRONG = "ok", "noisy", "wrong"
STATUSES = (OK, "compile", "resources", WRONG, "memory", "timeout", "crash", "error", NOISY)
MAX_SAMPLES = 64
#: The detail of a sample whose candidate was timed and has not passed verification with tensors of every layout.
PARTLY = "verified with contiguous tensors alone"

Directory = tuple[str, str, str]
DecisionKey = tuple[Problem, str]
SampleKey = tuple[Problem, "Choice", str]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a decision or sample is about: an implementation and its config.

    Attributes:
        implementation: the id, ``cuda:persistent``; in phase ``scheme`` the scheme, ``scheme:recompute``.
        config: the config; empty in phase ``scheme``.
    """

    implementation: str
    config: Config

    def __str__(self) -> str:
        return f"{self.implementation}({self.config.text})"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a measurement came from. ``triton`` and ``source`` rank an answer, the rest is for the reader.

    Attributes:
        triton: Triton's minor version, ``3.6``; ``none`` without Triton.
        source: the source hash of the implementation's launch function.
        torch: torch's version.
        driver: the driver's version.
        date: when, in ISO 8601 and UTC, so that texts sort by time.
        clocks: the clocks, as the vendor's tool words them.
        package: distribution and version of the implementation.
    """

    triton: str
    source: str
    torch: str = ""
    driver: str = ""
    date: str = ""
    clocks: str = ""
    package: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A decision as a table holds it.

    Attributes:
        problem: what was decided.
        choice: the winner.
        time_us: its median time in microseconds.
        default: the heuristic's choice, which the winner had to beat.
        default_us: the heuristic's median time in microseconds.
        noise: the relative noise seen, 0.01 for 1 %.
        protocol: how it was measured, ``cuda-events-1``; part of the key.
        provenance: where it came from.
    """

    problem: Problem
    choice: Choice
    time_us: float
    default: Choice
    default_us: float
    noise: float
    protocol: str
    provenance: Provenance

    @property
    def key(self) -> DecisionKey:
        """What a newer decision must agree in to replace this one, beside device and operation."""
        return self.problem, self.protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """One candidate's outcome.

    Attributes:
        problem: what it was tried on.
        choice: implementation and config.
        status: one of ``STATUSES``; ``ok`` is timed, and verified as far as ``detail`` says.
        time_us: median time in microseconds; None if it was not timed.
        extra_bytes: peak of memory beyond the outputs, in bytes; None if it was not seen.
        detail: why it failed, in one line; ``PARTLY`` if it may not serve yet.
        protocol: how it was measured; part of the key.
        provenance: where it came from.
    """

    problem: Problem
    choice: Choice
    status: str
    time_us: float | None
    extra_bytes: int | None
    detail: str
    protocol: str
    provenance: Provenance

    @property
    def key(self) -> SampleKey:
        """What a newer sample must agree in to replace this one, beside device and operation."""
        return self.problem, self.choice, self.protocol

    @property
    def verified(self) -> bool:
        """Whether it passed the whole of verification."""
        return self.status in (OK, NOISY) and self.detail != PARTLY


class Identified(Protocol):
    """What ``Table.verified`` needs of an implementation."""

    @property
    def id(self) -> str:
        """``vendor:name``."""

    @property
    def scheme(self) -> str:
        """The scheme it belongs to."""

    @property
    def phase(self) -> str:
        """The phase it computes."""


@dataclass(frozen=True, slots=True)
class Table:
    """Decisions and samples of one operation on one device.

    Attributes:
        directory: vendor, arch and ``sku-units``, the table's place below a root.
        op: the operation's name.
        device: the device as JSON values; empty if nothing was recorded yet.
        decisions: by problem and protocol.
        samples: by problem, choice and protocol.
        skipped: why entries of the file were left out, one text an entry.
        digest: the digest that the file carried, and that fits it; empty if it carried none, or for no file.
    """

    directory: Directory
    op: str
    device: Mapping[str, Any] = field(default_factory=dict)
    decisions: Mapping[DecisionKey, Stored] = field(default_factory=dict)
    samples: Mapping[SampleKey, Sample] = field(default_factory=dict)
    skipped: tuple[str, ...] = field(default=(), compare=False)
    digest: str = field(default="", compare=False)
    # What was built on the first question of a kind. Two threads may both build an index; they build the same one.
    _index: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.decisions or self.samples)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems there are decisions for, each once."""
        return tuple(dict.fromkeys(problem for problem, _ in self.decisions))

    def decision(self, problem: Problem, protocol: str | None = None) -> Stored | None:
        """The decision for exactly this problem.

        Args:
            problem: the problem.
            protocol: how it must have been measured; None takes the newest whatever the protocol.
        """
        if protocol is not None:
            return self.decisions.get((problem, protocol))
        protocols: set[str] | None = self._index.get("protocols")
        if protocols is None:
            protocols = self._index["protocols"] = {protocol for _, protocol in self.decisions}
        found = [s for p in protocols if (s := self.decisions.get((problem, p))) is not None]
        return max(found, key=_newest, default=None)

    def near(self, problem: Problem, bucket_dims: Iterable[str], protocol: str | None = None) -> Stored | None:
        """The first of ``nearest``; None if there is none."""
        return next(iter(self.nearest(problem, bucket_dims, protocol)), None)

    def nearest(self, problem: Problem, bucket_dims: Iterable[str], protocol: str | None = None) -> list[Stored]:
        """The decisions for problems that differ in nothing but the named dims, the nearest first.

        Nearest is the least sum of ``|log2(ratio)|`` over the named dims; ties go to the larger problem. The problem
        itself counts, at distance 0.

        Args:
            problem: the problem.
            bucket_dims: names of the dims that may differ.
            protocol: as for ``decision``.
        """
        names = frozenset(bucket_dims)
        groups: dict[tuple[object, ...], list[Stored]] | None = self._index.get(names)
        if groups is None:
            groups = {}
            for stored in self.decisions.values():
                groups.setdefault(_group(stored.problem, names), []).append(stored)
            self._index[names] = groups
        found = groups.get(_group(problem, names), ())
        free = [name for name in problem.dims if name in names]

        def rank(stored: Stored) -> tuple[object, ...]:
            ratios = [math.log2(stored.problem.dims[n]) - math.log2(problem.dims[n]) for n in free]  # type: ignore[arg-type]
            sizes = [stored.problem.dims[n] for n in free]
            # Rounded, so that two ways of summing one distance tie.
            return -round(sum(map(abs, ratios)), 9), round(sum(ratios), 9), sizes, _newest(stored)

        return sorted((s for s in found if protocol in (None, s.protocol)), key=rank, reverse=True)

    def samples_of(self, problem: Problem, protocol: str | None = None) -> list[Sample]:
        """Every sample of a problem, in the table's order; None takes those of every protocol."""
        index: dict[Problem, list[Sample]] | None = self._index.get("samples")
        if index is None:
            index = {}
            for sample in self.samples.values():
                index.setdefault(sample.problem, []).append(sample)
            self._index["samples"] = index
        return [s for s in index.get(problem, ()) if protocol in (None, s.protocol)]

    def verified(self, implementation: Identified, source: str) -> bool:
        """Whether an implementation, as its source now is, passed verification on this device.

        One config that passed is enough, one that gave wrong results is too many.

        Args:
            implementation: the implementation.
            source: the source hash of its launch function.
        """

        def same(entry: Stored | Sample) -> bool:
            asked = (implementation.id, implementation.scheme, implementation.phase, source)
            problem = entry.problem
            return (entry.choice.implementation, problem.scheme, problem.phase, entry.provenance.source) == asked

        found = [sample for sample in self.samples.values() if same(sample)]
        passed = any(sample.verified for sample in found) or any(map(same, self.decisions.values()))
        return passed and not any(sample.status == WRONG for sample in found)

    def wrong(self, implementation: Identified, config: Config, source: str) -> bool:
        """Whether this config of an implementation, as its source now is, gave wrong results for any problem.

        Args:
            implementation: the implementation.
            config: the config.
            source: the source hash of its launch function.
        """
        found: set[tuple[object, ...]] | None = self._index.get(WRONG)
        if found is None:
            wrong = [s for s in self.samples.values() if s.status == WRONG]
            found = {(s.choice, s.problem.scheme, s.problem.phase, s.provenance.source) for s in wrong}
            self._index[WRONG] = found
        return (Choice(implementation.id, config), implementation.scheme, implementation.phase, source) in found

    def merged(self, decisions: Iterable[Stored] = (), samples: Iterable[Sample] = ()) -> Table:
        """This table with newer entries.

        An entry replaces the one of equal key. Of one implementation, problem and protocol at most ``MAX_SAMPLES``
        samples stay: those that gave wrong results, which are a veto, then the fastest that are ``ok``, then the
        newest that failed.
        """
        newer = {stored.key: stored for stored in decisions}
        kept = dict(self.samples)
        touched: set[tuple[Problem, str, str]] = set()
        for sample in samples:
            kept[sample.key] = sample
            touched.add(_competitors(sample))
        groups: dict[tuple[Problem, str, str], list[Sample]] = {}
        for sample in kept.values() if touched else ():
            if (group := _competitors(sample)) in touched:
                groups.setdefault(group, []).append(sample)
        for group_samples in groups.values():
            for sample in _surplus(group_samples):
                del kept[sample.key]
        return replace(self, decisions={**self.decisions, **newer}, samples=kept, digest="")


def _newest(stored: Stored) -> tuple[str, str]:
    return stored.provenance.date, stored.protocol


def _group(problem: Problem, free: frozenset[str]) -> tuple[object, ...]:
    dims = problem.dims
    exact = tuple((name, None if name in free else size) for name, size in dims.items())
    return problem.scheme, problem.phase, exact, problem.dtypes, problem.flags


def _competitors(sample: Sample) -> tuple[Problem, str, str]:
    return sample.problem, sample.choice.implementation, sample.protocol


def _surplus(samples: list[Sample]) -> list[Sample]:
    """What goes beyond MAX_SAMPLES: failed ones from the oldest on, then the slowest, then wrong ones."""
    if len(samples) <= MAX_SAMPLES:
        return []

    def text(sample: Sample) -> tuple[str, str]:
        return sample.choice.config.text, repr(sample.choice.config)

    good = sorted((s for s in samples if s.status == OK), key=lambda s: (s.time_us or 0.0, text(s)))
    # Among those of one date, which may be none, the later in the table is the newer: merging appends.
    others = sorted((s for s in reversed(samples) if s.status != OK), key=lambda s: s.provenance.date, reverse=True)
    wrong, failed = ([s for s in others if (s.status == WRONG) is is_wrong] for is_wrong in (True, False))
    return [*wrong, *good, *failed][MAX_SAMPLES:]


def order(problem: Problem) -> tuple[object, ...]:
    """The sort key of a problem in a table: dims compare as numbers, so that rows=512 stands before rows=16384."""
    dims = tuple(problem.dims.items())
    return problem.phase, problem.scheme, dims, json.dumps(dict(problem.dtypes)), json.dumps(dict(problem.flags))


def diff(old: Table, new: Table) -> list[str]:
    """What changed between two tables, one line a decision and one for the samples of an implementation and problem."""
    lines = []
    for key in sorted({**old.decisions, **new.decisions}, key=lambda k: (order(k[0]), k[1])):
        was, now = old.decisions.get(key), new.decisions.get(key)
        if was is None and now is not None:
            lines.append(f"+ {_where(key)}: {_told(now)}")
        elif now is None and was is not None:
            lines.append(f"- {_where(key)}: {_told(was)}")
        elif was is not None and now is not None and was != now:
            what = f"{_told(was)} -> {_told(now)}"
            lines.append(f"~ {_where(key)}: {what if _told(was) != _told(now) else 'measured again, same outcome'}")
    counts: dict[tuple[Problem, str, str], list[int]] = {}
    for sample_key in {**old.samples, **new.samples}:
        before, after = old.samples.get(sample_key), new.samples.get(sample_key)
        if before != after:
            problem, choice, protocol = sample_key
            count = counts.setdefault((problem, choice.implementation, protocol), [0, 0, 0])
            count[0 if before is None else 2 if after is None else 1] += 1
    for (problem, name, protocol), (added, again, gone) in sorted(
        counts.items(), key=lambda item: (order(item[0][0]), item[0][1:])
    ):
        parts = [f"{n} {text}" for n, text in ((added, "new"), (again, "measured again"), (gone, "gone")) if n]
        lines.append(f"  samples of {name} for {_where((problem, protocol))}: {', '.join(parts)}")
    return lines


def _where(key: tuple[Problem, str]) -> str:
    return f"{key[0].text} [{key[1]}]"


def _told(stored: Stored) -> str:
    return f"{stored.choice} {duration(stored.time_us)}"


def duration(us: float) -> str:
    """A time in microseconds for people: ``63.2 us``, ``1.48 ms``, ``2.1 s``."""
    unit, size = ("us", 1.0) if us < 1e3 else ("ms", 1e3) if us < 1e6 else ("s", 1e6)
    return f"{us / size:.3g} {unit}" if us < 100 * size else f"{us / size:.0f} {unit}"
