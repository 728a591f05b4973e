"""Why a choice was made: every tier that was asked, every candidate, and why each one lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from liger_registry.decision import FREE, HITS, TIERS, Considered, Decision, SchemeDecision, Terms
from liger_registry.dispatch import Dispatcher
from liger_registry.implementation import ELSEWHERE, Implementation
from liger_registry.problem import SCHEME, Problem
from liger_registry.table import NOISY, OK, duration

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.table import Sample

CHOSEN, SLOWER, UNPROVEN, PASSED_OVER = "chosen", "slower", "not proven", "passed over"
REJECTED, UNMEASURED = "rejected", "not measured"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation with one config, and what became of it.

    Attributes:
        implementation: its id.
        distribution: who registered it.
        config: the config as text.
        verdict: ``chosen``, ``slower``, ``not proven`` (faster, but within the noise), ``rejected`` or
            ``not measured``.
        reason: why it is not chosen.
        time_us: its measured time in microseconds.
        extra_bytes: its measured peak beyond the outputs, in bytes.
    """

    implementation: str
    distribution: str
    config: str
    verdict: str
    reason: str
    time_us: float | None = None
    extra_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole trace of one choice.

    Attributes:
        problem: the problem.
        device: the device's fingerprint.
        decision: the answer.
        tiers: every answer that was considered, in order; tiers without an answer are not in it.
        candidates: every implementation and measured config of the phase, the fastest first.
    """

    problem: Problem
    device: str
    decision: Decision
    tiers: tuple[Considered, ...]
    candidates: tuple[Candidate, ...]

    @property
    def hit(self) -> bool:
        """Whether a table, plan or pin answered exactly."""
        return self.decision.source in HITS

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain JSON."""
        return {
            "op": self.problem.op,
            "problem": self.problem.to_json(),
            "device": self.device,
            "decision": {
                **self._answer(),
                "source": self.decision.source,
                "detail": self.decision.detail,
                "hit": self.hit,
            },
            "tiers": [asdict(tier) for tier in self.tiers],
            "candidates": [asdict(candidate) for candidate in self.candidates],
        }

    def _answer(self) -> dict[str, Any]:
        """What the answer is, as plain JSON."""
        return {"implementation": self.decision.implementation.id, "config": dict(self.decision.config)}

    def __str__(self) -> str:
        lines = [f"{self.problem.text} on {self.device}", f"  -> {self.decision}", "  tiers:"]
        lines += [f"    {'+' if t.accepted else '-'} {t.tier:13} {t.choice}  {t.reason}" for t in self.tiers]
        if not self.candidates:
            return "\n".join(lines)
        lines.append(f"  candidates:  {'time':>13} {'extra':>12}")
        foreign = [c.implementation for c in self.candidates if c.reason.startswith(ELSEWHERE)]
        for c in self.candidates:
            if c.implementation in foreign:
                continue
            time = duration(c.time_us) if c.time_us is not None else ""
            size = f"{c.extra_bytes / 2**20:.1f} MiB" if c.extra_bytes is not None else ""
            text = f"{c.implementation}({c.config})  {c.reason}".rstrip()
            lines.append(f"    {c.verdict:12} {time:>10} {size:>12}  {text}")
        if foreign:
            lines.append(f"    {REJECTED:12} {'':23}  for other devices: {', '.join(foreign)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SchemeExplanation(Explanation):
    """The trace of the choice of a scheme, which has no candidates of its own: its phases have.

    Attributes:
        decision: the answer.
    """

    decision: SchemeDecision  # type: ignore[assignment]

    def _answer(self) -> dict[str, Any]:
        return {"scheme": self.decision.scheme}


class Explanations(tuple[Explanation, ...]):
    """The explanations of a call, one a phase; prints as text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(str(explanation) for explanation in self)

    def to_json(self) -> list[dict[str, Any]]:
        """All of them as plain JSON."""
        return [explanation.to_json() for explanation in self]


def explain(dispatcher: Dispatcher, problem: Problem, device: Device, terms: Terms = FREE) -> Explanation:
    """Ask the tiers for a problem on a device and keep the trace; nothing is recorded or tuned.

    Of a problem of phase ``scheme`` it is a ``SchemeExplanation``.
    """
    tiers: list[Considered] = []
    if problem.phase == SCHEME:
        scheme = dispatcher.decide_scheme(problem, device, tiers)
        return SchemeExplanation(problem, device.fingerprint, scheme, _with_silent_tiers(dispatcher, tiers), ())
    decision = dispatcher.decide(problem, device, terms, tiers)
    candidates = tuple(_candidates(dispatcher, decision, device, terms))
    return Explanation(problem, device.fingerprint, decision, _with_silent_tiers(dispatcher, tiers), candidates)


def _with_silent_tiers(dispatcher: Dispatcher, considered: list[Considered]) -> tuple[Considered, ...]:
    """The trace with a line for each tier that was asked before the answer and had none."""
    spoke = {c.tier for c in considered}
    last = max((TIERS.index(c.tier) for c in considered if c.accepted), default=len(TIERS))
    lines = []
    for n, tier in enumerate(TIERS[: last + 1]):
        lines += [c for c in considered if c.tier == tier]
        if tier not in spoke and n < last:
            lines.append(Considered(tier, "-", False, "no answer" if tier in dispatcher.tiers else "not asked"))
    return tuple(lines)


def _candidates(dispatcher: Dispatcher, decision: Decision, device: Device, terms: Terms) -> Iterator[Candidate]:
    problem = decision.problem
    measured = _samples(dispatcher, decision, device)
    rows: list[Candidate] = []
    for implementation in dispatcher.in_order(problem):
        mine = [s for s in measured if s.choice.implementation == implementation.id]
        reason = implementation.capability.why_not(problem, device)
        if reason is None and terms.deterministic and not implementation.deterministic:
            reason = "it is not deterministic, and torch.use_deterministic_algorithms is on"
        if reason is not None:
            rows.append(_row(implementation, "", REJECTED, reason))
            continue
        rows += [_measured(implementation, sample, decision, device, terms) for sample in mine]
        chosen = decision.implementation.id == implementation.id
        if chosen and decision.config not in [s.choice.config for s in mine]:
            rows.append(_row(implementation, decision.config.text, CHOSEN, decision.source))
        elif not mine:
            config = implementation.propose(problem, device)
            if isinstance(config, str):
                rows.append(_row(implementation, "", REJECTED, config))
                continue
            illegal = implementation.why_illegal(config, problem, device, terms.budget, terms.deterministic)
            rows.append(
                _row(
                    implementation,
                    config.text,
                    REJECTED if illegal else UNMEASURED,
                    illegal or "run `liger-tune warmup`",
                )
            )
    best = {CHOSEN: 0, UNPROVEN: 1, PASSED_OVER: 1, SLOWER: 1, UNMEASURED: 2, REJECTED: 3}
    reference = next((c.time_us for c in rows if c.verdict == CHOSEN), None)
    rows = [_compared(row, reference, decision.source) for row in rows]
    yield from sorted(rows, key=lambda c: (best[c.verdict], c.time_us if c.time_us is not None else float("inf")))


def _samples(dispatcher: Dispatcher, decision: Decision, device: Device) -> list[Sample]:
    """The samples behind a choice: of the problem itself, else of the nearest that the tables hold."""
    problem = decision.problem
    for source in dispatcher.sources:
        table = source.store.load(device, problem.op)
        near = table.nearest(problem, dispatcher.bucket_dims(problem), device.protocol)
        for measured in (problem, *(stored.problem for stored in near)):
            if samples := table.samples_of(measured, device.protocol):
                return samples
    return []


def _measured(
    implementation: Implementation, sample: Sample, decision: Decision, device: Device, terms: Terms
) -> Candidate:
    config = sample.choice.config
    illegal = implementation.why_illegal(config, decision.problem, device, terms.budget, terms.deterministic)
    if sample.status not in (OK, NOISY):
        verdict, reason = REJECTED, f"{sample.status}: {sample.detail}"
    elif decision.implementation.id == implementation.id and decision.config == config:
        verdict, reason = CHOSEN, decision.source
    elif illegal is not None:
        verdict, reason = REJECTED, illegal
    else:
        verdict, reason = SLOWER, sample.detail
    return _row(implementation, config.text, verdict, reason, sample.time_us, sample.extra_bytes)


def _compared(row: Candidate, chosen_us: float | None, source: str) -> Candidate:
    """A candidate that lost on time, with how much it lost by."""
    if row.verdict != SLOWER or row.time_us is None or not chosen_us:
        return row
    ratio = row.time_us / chosen_us
    if ratio >= 1:
        return replace(row, reason=f"{ratio:.2f} x the chosen one's time")
    if source in HITS[2:]:
        return replace(
            row, verdict=UNPROVEN, reason=f"{1 - ratio:.1%} faster, no more than the noise: the choice stays"
        )
    return replace(row, verdict=PASSED_OVER, reason=f"{1 - ratio:.1%} faster, but the choice is {source}")


def _row(
    implementation: Implementation,
    config: str,
    verdict: str,
    reason: str,
    time_us: float | None = None,
    extra_bytes: int | None = None,
) -> Candidate:
    return Candidate(implementation.id, implementation.distribution, config, verdict, reason, time_us, extra_bytes)
