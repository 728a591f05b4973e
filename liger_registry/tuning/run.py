"""One tuning run: what is known, what is missing, and the decision for each problem.

What an earlier run measured with the same code is not measured again. Failures that may have been the machine's
(``provenance.TRANSIENT``) are tried again after a day, with another torch or version, or with ``force``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from liger_registry.problem import SCHEME, Problem
from liger_registry.table import NOISY, OK, PARTLY, Choice, Sample, Stored
from liger_registry.tuning.candidates import Candidate, candidates
from liger_registry.tuning.choose import choose, is_noisy, least_gain, noise_of, standard
from liger_registry.tuning.measure import CPU_CALL_S
from liger_registry.tuning.outcome import Outcome, Runner
from liger_registry.tuning.provenance import believed, fresh, provenance_of
from liger_registry.tuning.report import DEFAULT, FAILED, NOISE, NOTHING, REUSED, TOO_SLOW, TUNED, UNTUNED, Row
from liger_registry.tuning.schemes import GAIN, scheme_row
from liger_registry.tuning.verify import proxies_for, walk_for

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.device import Device
    from liger_registry.store import TableStore

FINALISTS = 3
#: Candidates that are timed again after the first look, at most; one slower than the best by this factor is given up.
SECOND_LOOK, GIVEN_UP = 12, 2.0
# Microseconds of samples of one candidate in the first look and in the final; each round between takes double.
QUICK_US, FINAL_US = 20_000.0, 200_000.0
_ATTEMPTS = 3
_BATCH = 8
_TIMED = (OK, NOISY)


class OutOfTime(Exception):
    """The run's time is up."""


@dataclass(slots=True)
class Run:
    """The state of one run; ``tune`` makes one.

    Attributes:
        catalog: what is registered.
        device: the device that decisions are for.
        store: where samples and decisions go.
        protocol: how it is measured.
        start: makes what runs candidates; called when the first one is to run.
        deadline: of ``time.monotonic``.
        force: measure everything anew.
        telling: told what is being done.
    """

    catalog: Catalog
    device: Device
    store: TableStore
    protocol: str
    start: Callable[[], Runner]
    deadline: float | None = None
    force: bool = False
    telling: Callable[[str], None] = lambda text: None
    _runner: Runner | None = None
    _about: Mapping[str, str] = field(default_factory=dict)
    _rows: dict[Problem, Row] = field(default_factory=dict)
    _verified: dict[tuple[object, bool], Outcome] = field(default_factory=dict)

    def tune(self, problem: Problem) -> Row:
        """The row of a problem, whose samples and decision are persisted by then."""
        if problem not in self._rows:
            self._rows[problem] = scheme_row(self, problem) if problem.phase == SCHEME else self._phase(problem)
        return self._rows[problem]

    # -- one phase -------------------------------------------------------------------------------------------------

    def _phase(self, problem: Problem) -> Row:
        found = candidates(self.catalog, problem, self.device)
        default = found.default
        if default is None:
            return Row(problem, NOTHING, detail="; ".join(f"{r.choice}: {r.reason}" for r in found.rejected)[:500])
        legal = {c.choice: c for c in found.legal}
        known = {} if self.force else self._known(problem, legal)
        missing = [c for choice, c in legal.items() if choice not in known]
        stored = None if self.force else self._stored(problem, legal, default)
        row = Row(problem, REUSED, default=default.choice, reused=len(known))
        first = known.get(default.choice)
        if first is not None and first.detail.startswith(TOO_SLOW):
            return replace(row, status=TOO_SLOW, detail=first.detail)
        if stored is not None and not missing:
            return replace(row, choice=stored.choice, time_us=stored.time_us, default_us=stored.default_us)
        try:
            if (
                first is None
                and self.device.vendor in ("cpu", "interpreter")
                and (slow := self._too_slow(problem, default))
            ):
                return replace(row, status=TOO_SLOW, detail=slow)
            self._stages(problem, legal)
            new = self._first_look(problem, missing, known)
            row = replace(row, measured=len(new))
            known.update(new)
            return self._decide(problem, legal, default, known, set(new), stored, row)
        except OutOfTime:
            return replace(row, status=UNTUNED, detail="the time was up")

    def _stages(self, problem: Problem, legal: Mapping[Choice, Candidate]) -> None:
        """Tune what composites run inside, first: each of theirs is measured with the best stages there are."""
        for candidate in legal.values():
            if candidate.heuristic and candidate.implementation.stages is not None:
                for stage in candidate.implementation.stages(problem, candidate.config).values():
                    self.tune(stage)

    def _known(self, problem: Problem, legal: Mapping[Choice, Candidate]) -> dict[Choice, Sample]:
        samples = self.store.load(self.device, problem.op).samples_of(problem, self.protocol)
        return {s.choice: s for s in samples if s.choice in legal and believed(s, legal[s.choice].implementation)}

    def _stored(self, problem: Problem, legal: Mapping[Choice, Candidate], default: Candidate) -> Stored | None:
        stored = self.store.load(self.device, problem.op).decision(problem, self.protocol)
        if stored is None or stored.choice not in legal or not stored.noise >= 0:
            return None
        today = fresh(stored.provenance, legal[stored.choice].implementation)
        # Another default than today's: the gain it was chosen for is another one too.
        return stored if today and stored.default in legal and legal[stored.default].heuristic else None

    def _too_slow(self, problem: Problem, default: Candidate) -> str:
        if self.device.vendor not in ("cpu", "interpreter"):
            return ""
        self._check_time(f"probing {default}")
        outcome = self._ready().probe(problem, default)
        if outcome.status == OK and outcome.time_us is not None and outcome.time_us * 1e-6 > CPU_CALL_S:
            text = f"{TOO_SLOW}: one call would take {outcome.time_us * 1e-6:.1f} s"
            # Kept as a sample, so that the next run need not find out again.
            self._record(problem, [(default, Outcome("timeout", text))])
            return text
        return ""

    def _first_look(
        self, problem: Problem, missing: Sequence[Candidate], known: Mapping[Choice, Sample]
    ) -> dict[Choice, Sample]:
        """Verify and time each candidate on its own; each sample is persisted before the next candidate begins.

        Verification is with contiguous tensors alone, whose kernels measuring needs too: the others take a compile for
        each candidate, of which few get as far as the final.
        """
        if not missing:
            return {}
        self._check_time(f"compiling {len(missing)} candidates")
        found: dict[Choice, Sample] = {}
        ready: list[Candidate] = []
        for candidate, outcome in zip(missing, self._compile(problem, missing, full=False), strict=True):
            # One that died while compiling says nothing of the others: these compile as they run.
            if outcome.status in (OK, ""):
                ready.append(candidate)
            else:
                found.update(self._record(problem, [(candidate, outcome)]))
        best = min((s.time_us for s in known.values() if s.status in _TIMED and s.time_us), default=math.inf)
        for candidate in ready:
            self._check_time(str(candidate))
            outcome = self._verify(problem, candidate, full=False)
            if outcome.status == OK:
                outcome = self._ready().measure(problem, [candidate], QUICK_US, GIVEN_UP * best)[0]
                best = min(best, outcome.time_us or math.inf)
            if outcome.status == OK:
                outcome = replace(outcome, detail=PARTLY)
            found.update(self._record(problem, [(candidate, outcome)]))
        return found

    def _compile(self, problem: Problem, wanted: Sequence[Candidate], full: bool) -> list[Outcome]:
        return self._ready().compile(problem, wanted, full=full) if wanted else []

    def _verify(self, problem: Problem, candidate: Candidate, full: bool) -> Outcome:
        key = self._proof(problem, candidate)
        if not full and (key, True) in self._verified:
            return self._verified[key, True]
        if (key, full) not in self._verified:
            self._verified[key, full] = self._ready().verify(problem, candidate, full=full)
        return self._verified[key, full]

    def _passed(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether this run has verified a candidate in full."""
        outcome = self._verified.get((self._proof(problem, candidate), True))
        return outcome is not None and outcome.status == OK

    def _proof(self, problem: Problem, candidate: Candidate) -> object:
        # Problems whose proxies are equal, as all row buckets of one width, are verified by the same cases.
        op = self.catalog.op(problem.op)
        implementation, config = candidate.implementation, candidate.config
        proxies = proxies_for(op, implementation, config, problem, self.device)
        walk = walk_for(op, implementation, config, problem, self.device, proxies)
        sizes = tuple(None if dims is None else problem.having(**dims) for dims in (*proxies, walk))
        return implementation.key, config, sizes

    # -- the decision ----------------------------------------------------------------------------------------------

    def _decide(
        self,
        problem: Problem,
        legal: Mapping[Choice, Candidate],
        default: Candidate,
        known: dict[Choice, Sample],
        new: set[Choice],
        stored: Stored | None,
        row: Row,
    ) -> Row:
        def timed(only: set[Choice] | None = None) -> list[Candidate]:
            passed = [s for s in known.values() if s.status in _TIMED and (only is None or s.choice in only)]
            return [legal[s.choice] for s in sorted(passed, key=lambda s: s.time_us or math.inf)]

        contenders = timed()
        if not contenders:
            failed = "; ".join(f"{s.choice}: {s.status} {s.detail}" for s in known.values())
            return replace(row, status=FAILED, detail=failed[:500])
        row = replace(row, default=standard(default, contenders, legal.values()).choice)
        if stored is not None and legal[stored.choice] in contenders:
            limit = stored.time_us * (1 - max(GAIN, stored.noise))
            challengers = [c for c in timed(new) if (known[c.choice].time_us or math.inf) < limit * 1.1]
            if not challengers:
                # What is new cannot win, even if its first look was 10 % off.
                return replace(row, choice=stored.choice, time_us=stored.time_us, default_us=stored.default_us)
            ranked = [*challengers[: FINALISTS - 1], legal[stored.choice], *challengers[FINALISTS - 1 :]]
            decided = self._final(problem, ranked, legal, default, known, row)
            if decided.status != FAILED or not (contenders := timed()):
                return decided
        return self._final(problem, self._halve(problem, contenders, known), legal, default, known, row)

    def _halve(self, problem: Problem, contenders: list[Candidate], known: dict[Choice, Sample]) -> list[Candidate]:
        """Successive halving: the better half is timed again for double the time, until three are left.

        They come first, and what dropped out behind them.
        """
        budget, dropped = QUICK_US, list[Candidate]()
        while len(contenders) > FINALISTS:
            kept = max(FINALISTS, min(SECOND_LOOK, len(contenders) // 2))
            contenders, dropped = contenders[:kept], [*contenders[kept:], *dropped]
            if len(contenders) == FINALISTS:
                break
            budget *= 2
            for start in range(0, len(contenders), _BATCH):
                batch = contenders[start : start + _BATCH]
                self._check_time(f"timing {len(batch)} candidates in turn")
                outcomes = self._ready().measure(problem, batch, budget)
                pairs = [(c, o) for c, o in self._again(batch, outcomes, known) if o.status]
                known.update(self._record(problem, pairs))
            contenders = [c for c in contenders if known[c.choice].status in _TIMED]
            contenders.sort(key=lambda c: known[c.choice].time_us or math.inf)
        return [*contenders, *dropped]

    def _finalists(
        self,
        problem: Problem,
        ranked: Sequence[Candidate],
        legal: Mapping[Choice, Candidate],
        default: Candidate,
        known: dict[Choice, Sample],
    ) -> tuple[list[Candidate], Candidate]:
        """The best three and the default, all of which passed verification in full, and which of them is the default.

        In full is with tensors of every layout, and once at the problem's own sizes.

        What fails is recorded, and the next best takes its place. Of each implementation the fastest config and the
        heuristic's are verified too, because they serve where it is pinned, or where nothing was measured.
        """
        while able := [c for c in ranked if known[c.choice].status in _TIMED]:
            # The default need not be among those that are ranked: they may be few that challenge an earlier choice.
            works = [c for c in legal.values() if c.choice in known and known[c.choice].status in _TIMED]
            default = standard(default, works, legal.values())
            finalists = [*able[:FINALISTS], *([] if default in able[:FINALISTS] else [default])]
            fastest = {c.implementation.id: c for c in reversed(able)}
            asked = [*finalists, *(c for c in able if c.heuristic or fastest[c.implementation.id] is c)]
            unproven = list({c.choice: c for c in asked if not known[c.choice].verified}.values())
            if not unproven:
                return finalists, default
            self._check_time(f"verifying {len(unproven)} candidates in full")
            uncompiled = [c for c in unproven if not self._passed(problem, c)]
            compiled = dict(
                zip((c.choice for c in uncompiled), self._compile(problem, uncompiled, full=True), strict=True)
            )
            for candidate in unproven:
                outcome = compiled.get(candidate.choice, Outcome(OK))
                if outcome.status in (OK, ""):
                    outcome = self._verify(problem, candidate, full=True)
                if outcome.status == OK:
                    outcome = self._ready().verify_whole(problem, candidate)
                if outcome.status != OK:
                    known.update(self._record(problem, [(candidate, outcome)]))
                else:
                    known[candidate.choice] = replace(known[candidate.choice], detail="")
            proven = [s for c in unproven if (s := known[c.choice]).verified]
            self.store.record(self.device, problem.op, samples=proven)
        return [], default

    def _final(
        self,
        problem: Problem,
        ranked: Sequence[Candidate],
        legal: Mapping[Choice, Candidate],
        default: Candidate,
        known: dict[Choice, Sample],
        row: Row,
    ) -> Row:
        best: list[Outcome] = []
        finalists, default = self._finalists(problem, ranked, legal, default, known)
        for _ in range(_ATTEMPTS):
            while finalists:
                self._check_time(f"timing the best {len(finalists)} in turn")
                outcomes = self._ready().measure(problem, finalists, FINAL_US)
                broken = [(c, o) for c, o in zip(finalists, outcomes, strict=True) if o.status not in ("", OK)]
                if not broken:
                    break
                known.update(self._record(problem, broken))
                best = []
                finalists, default = self._finalists(problem, ranked, legal, default, known)
            if not finalists:
                failed = "; ".join(f"{s.choice}: {s.status} {s.detail}" for s in known.values())
                return replace(row, status=FAILED, detail=failed[:500])
            if not best or noise_of(outcomes) < noise_of(best):
                best = outcomes
            if not is_noisy(outcomes):
                best = outcomes
                break
        noisy, noise = is_noisy(best), noise_of(best)
        status = NOISY if noisy else OK
        pairs = [(c, replace(o, status=status)) for c, o in self._again(finalists, best, known)]
        samples = self._samples(problem, pairs)
        times = {c.choice: o.time_us or math.inf for c, o in pairs}
        winner = legal[choose(times, default.choice, legal, least_gain(best))]
        time_us, standard_us = times[winner.choice], times[default.choice]
        decision = Stored(
            problem,
            winner.choice,
            time_us,
            default.choice,
            standard_us,
            noise,
            self.protocol,
            provenance_of(winner.implementation, self._about),
        )
        self.store.record(self.device, problem.op, decisions=[decision], samples=samples)
        word = TUNED if winner is not default else NOISE if noisy else DEFAULT
        detail = f"noise {noise:.1%}" if noisy else ""
        return replace(
            row,
            status=word,
            choice=winner.choice,
            default=default.choice,
            time_us=time_us,
            default_us=standard_us,
            detail=detail,
        )

    # -- records ---------------------------------------------------------------------------------------------------

    def _record(self, problem: Problem, pairs: Sequence[tuple[Candidate, Outcome]]) -> dict[Choice, Sample]:
        samples = self._samples(problem, pairs)
        self.store.record(self.device, problem.op, samples=samples)
        return {s.choice: s for s in samples}

    def _samples(self, problem: Problem, pairs: Sequence[tuple[Candidate, Outcome]]) -> list[Sample]:
        return [
            Sample(
                problem,
                c.choice,
                o.status,
                o.time_us,
                o.extra_bytes,
                o.detail,
                self.protocol,
                provenance_of(c.implementation, self._about),
            )
            for c, o in pairs
        ]

    @staticmethod
    def _again(
        timed: Sequence[Candidate], outcomes: Sequence[Outcome], known: Mapping[Choice, Sample]
    ) -> list[tuple[Candidate, Outcome]]:
        """Outcomes of candidates that were timed again, which are as far verified as they were."""
        pairs = zip(timed, outcomes, strict=True)
        return [(c, replace(o, detail=known[c.choice].detail) if o.status == OK else o) for c, o in pairs]

    def _ready(self) -> Runner:
        if self._runner is None:
            self._runner = self.start()
            self._about = self._runner.describe()
        return self._runner

    def _check_time(self, text: str) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime
        self.telling(text)
