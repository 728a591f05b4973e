"""Choosing: from a problem on a device to one implementation and config, and where the answer came from.

The tiers are asked in order and every answer is held against legality; the first that stands wins. All of this runs on
a miss of the caller's memo only, so it keeps its whole trace.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from liger_registry.config import Config
from liger_registry.decision import (
    EXACT,
    FREE,
    HEURISTIC,
    HITS,
    LENIENT,
    NEAR,
    PINNED,
    PLAN,
    REFERENCE,
    SHIPPED,
    SHIPPED_NEAR,
    SHIPPED_TABLES,
    SIBLING,
    STALE,
    TIERS,
    USER,
    Answer,
    Considered,
    Decision,
    SchemeDecision,
    Source,
    Terms,
    differences,
)
from liger_registry.errors import (
    ConfigOutsideSpaceError,
    NoImplementationError,
    PluginWarning,
    StrictMissError,
    UnknownImplementationError,
)
from liger_registry.implementation import ANY, REFERENCE_ID, Implementation, source_hash
from liger_registry.launch import triton_version
from liger_registry.op import DimKind
from liger_registry.problem import FORWARD, SCHEME, Problem
from liger_registry.reference import reference_implementation
from liger_registry.table import Choice, Stored, Table

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.device import Device
    from liger_registry.plan import Plan

_Decided = TypeVar("_Decided", Decision, SchemeDecision)
# Of the problems near to one, as many are tried until an answer is legal.
MOST_NEAR = 16


@dataclass(slots=True)
class Dispatcher:
    """Resolves problems against catalogue, plan and tables.

    Attributes:
        catalog: what is registered.
        sources: the stores of tables, user cache first.
        mode: ``lookup``, ``tune``, ``strict`` or ``off``.
        plan: the frozen plan, once there is one.
        on_miss: called with a missed problem and its device; in mode ``tune`` it may fill the user's table and return
            True to have the tiers asked again.
    """

    catalog: Catalog
    sources: Sequence[Source]
    mode: str = "lookup"
    plan: Plan | None = None
    on_miss: Callable[[Problem, Device], bool] | None = None
    _tuning: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _broken: set[object] = field(default_factory=set, repr=False)  # what was warned of

    def decide(
        self, problem: Problem, device: Device, terms: Terms = FREE, trace: list[Considered] | None = None
    ) -> Decision:
        """The decision for a problem on a device.

        Args:
            problem: the problem.
            device: the device.
            terms: pins, determinism, budget.
            trace: filled with every answer considered, if given; a traced question records no miss and tunes nothing.

        Raises:
            UnknownImplementationError: a pin names an implementation that is not there.
            NoImplementationError: a pinned implementation cannot serve the problem.
            StrictMissError: mode ``strict``, and only a miss would answer.
        """
        return self._asked(lambda seen: self._first(problem, device, terms, seen), problem, device, trace)

    def decide_scheme(self, problem: Problem, device: Device, trace: list[Considered] | None = None) -> SchemeDecision:
        """Which scheme a problem of phase ``scheme`` takes: the plan's or a table's, else the contract's first.

        Args:
            problem: the problem.
            device: the device.
            trace: as for ``decide``.

        Raises:
            StrictMissError: mode ``strict``, and only a miss would answer.
        """
        return self._asked(lambda seen: self._first_scheme(problem, device, seen), problem, device, trace)

    def _asked(
        self,
        first: Callable[[list[Considered]], _Decided],
        problem: Problem,
        device: Device,
        trace: list[Considered] | None,
    ) -> _Decided:
        """The first answer of the tiers, with what a miss has to do."""
        answer = first([] if trace is None else trace)
        if answer.source in HITS or trace is not None:
            return answer
        if self.mode == "strict":
            raise self._strict_miss(problem, device, answer)
        if self.on_miss is None:
            return answer
        if self.mode != "tune":
            self.on_miss(problem, device)
            return answer
        with self._tuning:  # of several threads that miss one problem the first tunes, the others find its answer
            answer = first([])
            if answer.source not in HITS and self.on_miss(problem, device):
                answer = first([])
            return answer

    def _first_scheme(self, problem: Problem, device: Device, considered: list[Considered]) -> SchemeDecision:
        op = self.catalog.op(problem.op)
        names = [scheme.name for scheme in op.schemes_for(op.options_of(problem))]
        tiers = [tier for tier in self.tiers if tier not in (PINNED, HEURISTIC, REFERENCE)]
        for answer in self._answers(problem, device, FREE, tiers, considered):
            name, detail = answer.choice.implementation.removeprefix("scheme:"), answer.detail
            known = name in names
            considered.append(Considered(answer.tier, name, known, detail if known else "no such scheme"))
            if known:
                return SchemeDecision(problem, name, answer.tier, detail)
        considered.append(Considered(HEURISTIC, names[0], True, "the contract's first"))
        return SchemeDecision(problem, names[0], HEURISTIC, "the contract's first")

    def decide_without_io(self, problem: Problem, device: Device, terms: Terms = FREE) -> Decision:
        """The decision from pins, plan and heuristics alone: no table is read, no miss recorded (stream capture)."""
        return replace(self, mode="off", sources=(), on_miss=None)._first(problem, device, terms, [])

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that are asked, in order."""
        return TIERS if self._readable else (PINNED, PLAN, HEURISTIC, REFERENCE)

    @property
    def _readable(self) -> tuple[Source, ...]:
        """The stores that may be read: after freeze() every rank decides by one rule, whatever tables it has."""
        return () if self.mode == "off" or self.plan is not None else tuple(self.sources)

    def _first(self, problem: Problem, device: Device, terms: Terms, considered: list[Considered]) -> Decision:
        for answer in self._answers(problem, device, terms, self.tiers, considered):
            if (decision := self._judge(answer, problem, device, terms, considered)) is not None:
                return decision
            if answer.tier == PINNED and answer.detail != LENIENT:
                raise self._cannot(answer.choice.implementation, problem, considered[-1].reason)
        implementation = reference_implementation(self.catalog.op(problem.op), problem)
        over = self._over_budget(problem, device, terms)
        considered.append(Considered(REFERENCE, implementation.id, True, over or "nothing else was legal"))
        return Decision(problem, implementation, Config(), REFERENCE, over)

    def _over_budget(self, problem: Problem, device: Device, terms: Terms) -> str:
        """What the last tier, which is held to no budget, says where the budget alone left nothing else."""
        for implementation in self.in_order(problem) if terms.budget is not None else ():
            if not implementation.trusted or implementation.capability.why_not(problem, device) is not None:
                continue
            config = implementation.propose(problem, device)
            if not isinstance(config, str) and not implementation.why_illegal(
                config, problem, device, None, terms.deterministic
            ):
                return f"over the budget of {terms.budget:,} bytes, from which the last tier is exempt"
        return ""

    def _judge(
        self, answer: Answer, problem: Problem, device: Device, terms: Terms, considered: list[Considered]
    ) -> Decision | None:
        tier, choice, text = answer.tier, answer.choice, str(answer.choice)
        try:
            if tier == PLAN and choice.implementation == REFERENCE_ID:
                implementation = reference_implementation(self.catalog.op(problem.op), problem)
            else:
                implementation = self.catalog.find(problem.op, problem.scheme, problem.phase, choice.implementation)
            config = implementation.space.parse(choice.config)
        except (UnknownImplementationError, ConfigOutsideSpaceError) as error:
            considered.append(Considered(tier, text, False, error.why or error.what))
            return None
        reason = implementation.why_illegal(config, problem, device, terms.budget, terms.deterministic)
        if reason is None and tier not in (PINNED, PLAN):
            reason = self._why_distrusted(answer, implementation, config, problem, device)
        considered.append(Considered(tier, text, reason is None, reason or answer.detail))
        return Decision(problem, implementation, config, tier, answer.detail) if reason is None else None

    def _why_distrusted(
        self, answer: Answer, implementation: Implementation, config: Config, problem: Problem, device: Device
    ) -> str | None:
        """Why what is legal is not to be run here; None if it may be.

        A pin is the user's own word. A plan was held against all this when it was made: from then on every rank
        decides alike, whatever its own tables say.
        """
        source = source_hash(implementation.launch)
        if any(table.wrong(implementation, config, source) for table in self._mine(problem, device)):
            return "it gave wrong results on this device"
        if implementation.trusted:
            return None
        # Another's, another device's, another source's or nobody's measurement: it must have passed verification here.
        exact = answer.tier == EXACT and answer.local
        if not exact and not self._verified(implementation, problem, device):
            return "it was not verified on this device; `liger-tune warmup` does it"
        reason = implementation.why_not_importable()
        if reason is not None and implementation.key not in self._broken:
            self._broken.add(implementation.key)
            warnings.warn(f"{implementation.id} of {problem.op} is left out: {reason}", PluginWarning, stacklevel=2)
        return reason

    def _mine(self, problem: Problem, device: Device) -> list[Table]:
        """What was measured on this very device, by this user."""
        return [source.store.load(device, problem.op) for source in self._readable if source.kind == USER]

    def _verified(self, implementation: Implementation, problem: Problem, device: Device) -> bool:
        source = source_hash(implementation.launch)
        return any(table.verified(implementation, source) for table in self._mine(problem, device))

    # -- the tiers -------------------------------------------------------------------------------------------------

    def _answers(
        self, problem: Problem, device: Device, terms: Terms, tiers: Sequence[str], considered: list[Considered]
    ) -> Iterator[Answer]:
        """Every tier's answers in order."""
        for tier in tiers:
            if tier == PINNED:
                yield from self._pinned(problem, device, terms)
            elif tier == PLAN:
                if self.plan is not None and (choice := self.plan.get(device.fingerprint, problem)) is not None:
                    yield Answer(tier, choice, f"plan {self.plan.digest[:12]}")
            elif tier == SIBLING:
                yield from self._siblings(problem, device)
            elif tier == HEURISTIC:
                yield from self._heuristics(problem, device, considered)
            elif tier != REFERENCE:
                yield from self._stored(tier, problem, device)

    def _pinned(self, problem: Problem, device: Device, terms: Terms) -> Iterator[Answer]:
        for target, name, config in terms.pins:
            op, _, phase = target.partition("/")
            if op != problem.op or phase not in ("", problem.phase):
                continue
            there = self.catalog.implementations(problem.op, problem.scheme)
            every = [i for i in there if name in (i.id, i.name)]
            if every and not phase and problem.phase not in {i.phase for i in every}:
                continue  # the name exists in the other phase alone, and the pin did not say which phase it means
            named = [i for i in every if i.phase == problem.phase and i.capability.vendor in _vendors(device)]
            # Without one for this device: the single one there is, or the error that names the candidates.
            implementation = named[0] if named else self.catalog.find(problem.op, problem.scheme, problem.phase, name)
            # A name that both phases have, pinned without a phase, is only a wish for backward.
            lenient = not phase and problem.phase != FORWARD and any(i.phase == FORWARD for i in every)
            chosen: Config | str | None = implementation.capability.why_not(problem, device)
            if chosen is None:
                chosen = config or self._best_config(implementation, problem, device, terms)
            if isinstance(chosen, str):
                if lenient:
                    continue
                raise self._cannot(implementation.id, problem, chosen)
            yield Answer(PINNED, Choice(implementation.id, chosen), LENIENT if lenient else target)
            if not lenient:
                return

    def _cannot(self, name: str, problem: Problem, reason: str) -> NoImplementationError:
        return NoImplementationError(
            f"the pinned implementation {name} cannot serve {problem.text}",
            why=reason,
            candidates=[i.id for i in self.catalog.implementations(problem.op, problem.scheme, problem.phase)],
            fix="pin another, or none",
        )

    def _best_config(
        self, implementation: Implementation, problem: Problem, device: Device, terms: Terms
    ) -> Config | str:
        """The fastest measured config of a pinned implementation that is legal, else what its heuristic proposes."""
        best: tuple[float, Config] | None = None
        planned = self.plan.get(device.fingerprint, problem) if self.plan is not None else None
        if planned is not None and planned.implementation == implementation.id:
            return planned.config
        for source in self._readable:
            for sample in source.store.load(device, problem.op).samples_of(problem, device.protocol):
                config, time = sample.choice.config, sample.time_us
                if sample.choice.implementation != implementation.id or not sample.verified or time is None:
                    continue
                if (best is None or time < best[0]) and not implementation.why_illegal(
                    config, problem, device, terms.budget
                ):
                    best = time, config
        return implementation.propose(problem, device) if best is None else best[1]

    def _stored(self, tier: str, problem: Problem, device: Device) -> Iterator[Answer]:
        shipped = tier in (SHIPPED, SHIPPED_NEAR)
        for source in self.sources:
            if (source.kind == SHIPPED_TABLES) is not shipped:
                continue
            table = source.store.load(device, problem.op)
            near = tier in (NEAR, SHIPPED_NEAR)
            for stored in self._found(table, problem, device, near):
                detail = f"{source.kind}, measured at {stored.problem.dims.text}" if near else source.kind
                stale = self.staleness(stored)
                if (tier == EXACT and stale) or (tier == STALE and not stale):
                    continue
                yield Answer(tier, stored.choice, f"{detail}, {stale}" if stale else detail, source.kind == USER)

    def _found(self, table: Table, problem: Problem, device: Device, near: bool) -> Sequence[Stored]:
        """What a table decided for a problem, or for those near to it, as this device is measured."""
        if near:
            return table.nearest(problem, self.bucket_dims(problem), device.protocol)[:MOST_NEAR]
        stored = table.decision(problem, device.protocol)
        return () if stored is None else (stored,)

    def _siblings(self, problem: Problem, device: Device) -> Iterator[Answer]:
        rank = {sku: n for n, sku in enumerate((device.sku, *device.siblings))}

        def sku(table: Table) -> str:
            return table.directory[2].rpartition("-")[0]

        for near in (False, True):
            for source in self.sources:
                tables = source.store.siblings(device, problem.op)
                for table in sorted(tables, key=lambda t: (rank.get(sku(t), len(rank)), t.directory)):
                    for stored in self._found(table, problem, device, near):
                        where = f"measured on {table.directory[2]}, {stored.problem.dims.text}"
                        yield Answer(SIBLING, stored.choice, where)

    def _heuristics(self, problem: Problem, device: Device, considered: list[Considered]) -> Iterator[Answer]:
        for implementation in self.in_order(problem):
            if implementation.capability.why_not(problem, device) is not None:
                continue
            proposed = implementation.propose(problem, device)
            reason = proposed if isinstance(proposed, str) else implementation.why_not_untuned(problem, device)
            if isinstance(proposed, str) or reason is not None:
                considered.append(Considered(HEURISTIC, implementation.id, False, str(reason)))
            else:
                yield Answer(HEURISTIC, Choice(implementation.id, proposed), "untuned")

    def in_order(self, problem: Problem) -> list[Implementation]:
        """The implementations of a problem's phase in the order in which the heuristic tier tries them."""
        return self.catalog.in_order(problem)

    def bucket_dims(self, problem: Problem) -> list[str]:
        """The dims of a problem's key that are buckets."""
        return [name for name, kind in self.catalog.op(problem.op).dims.items() if kind is DimKind.BUCKET]

    def staleness(self, stored: Stored) -> str:
        """What has changed since an entry was measured; empty if nothing that matters."""
        problem = stored.problem
        if problem.phase == SCHEME:
            return ""  # its phases are judged when they are decided
        try:
            implementation = self.catalog.find(problem.op, problem.scheme, problem.phase, stored.choice.implementation)
        except UnknownImplementationError:
            return "its implementation is gone"
        changes = []
        if implementation.capability.vendor != ANY and stored.provenance.triton != triton_version():
            changes.append(f"measured with Triton {stored.provenance.triton}, this is {triton_version()}")
        if stored.provenance.source != source_hash(implementation.launch):
            changes.append("its source has changed since")
        return "; ".join(changes)

    def _strict_miss(self, problem: Problem, device: Device, decision: Decision | SchemeDecision) -> StrictMissError:
        tables = [source.store.load(device, problem.op) for source in self._readable]
        entries = [s for table in tables for s in table.decisions.values() if s.protocol == device.protocol]
        nearest = min(entries, key=lambda s: len(differences(problem, s.problem)), default=None)
        why = [f"the best answer would be {decision}"]
        if nearest is not None:
            if different := differences(problem, nearest.problem):
                why.append(f"the nearest entry differs in {', '.join(different)}")
            if stale := self.staleness(nearest):
                why.append(f"the nearest entry is stale: {stale}")
        return StrictMissError(
            f"no table answers {problem.text} on {device.fingerprint} exactly",
            why="; ".join(why),
            fix="`liger-tune warmup` for this model, or LIGER_TUNE_MODE=lookup",
        )


def _vendors(device: Device) -> tuple[str, ...]:
    return (ANY, device.vendor, device.emulates)
