"""Freezing: one plan for a job, from the tables its ranks can read and the calls they have made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from liger_registry.decision import SHIPPED_TABLES, Decision, Terms
from liger_registry.dispatch import Dispatcher
from liger_registry.errors import PlanError
from liger_registry.implementation import REFERENCE_ID
from liger_registry.plan import Exchange, Part, Plan, agree
from liger_registry.problem import SCHEME, Problem
from liger_registry.table import Choice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from liger_registry.catalog import Catalog
    from liger_registry.device import Device


@dataclass(frozen=True, slots=True)
class Freezer:
    """What this rank freezes.

    Attributes:
        dispatcher: decides on this rank; without a plan of its own.
        device: this rank's device.
        problems: what this rank wants decided.
        terms: under which terms it decides a problem.
        load: loads the kernels of decisions, if that is wanted.
    """

    dispatcher: Dispatcher
    device: Device
    problems: Callable[[], Iterable[Problem]]
    terms: Callable[[Problem], Terms]
    load: Callable[[list[Decision]], object] | None = None

    def part(self) -> Part:
        """This rank's part in the agreement."""
        return Part(self.device.fingerprint, self.problems, self._resolve, self._validate)

    def _resolve(self, problem: Problem) -> Choice:
        if problem.phase == SCHEME:
            return self.dispatcher.decide_scheme(problem, self.device, []).choice
        return self.dispatcher.decide(problem, self.device, self.terms(problem), []).choice

    def _validate(self, plan: Plan) -> None:
        validate(plan, self.dispatcher.catalog, self.device)
        if self.load is not None:
            planned = replace(self.dispatcher, plan=plan)
            mine = [p for place, p in plan if place == self.device.fingerprint and p.phase != SCHEME]
            self.load([planned.decide(problem, self.device, self.terms(problem), []) for problem in mine])


def make_plan(group: ProcessGroup | None, prepare: Callable[[], Freezer]) -> Plan:
    """The plan that all ranks of a group agree on.

    Args:
        group: a process group; None for the default one, or for this process alone.
        prepare: what this rank freezes. It may raise: the other ranks are told, instead of being left to wait.

    Raises:
        PlanError: a rank could not decide or cannot carry the plan out; raised on every rank.
    """
    return agree(Exchange(group), lambda: prepare().part())


def tabled(dispatcher: Dispatcher, device: Device) -> set[Problem]:
    """The problems in the tables this process can read, as far as the contracts still have such problems."""
    found: set[Problem] = set()
    for op in dispatcher.catalog.ops():
        for source in dispatcher.sources if dispatcher.mode != "off" else ():
            tables = [source.store.load(device, op.name)]
            if source.kind == SHIPPED_TABLES:
                tables += source.store.siblings(device, op.name)
            decided = dict.fromkeys(p for t in tables for p, protocol in t.decisions if protocol == device.protocol)
            found |= {problem for problem in decided if op.has(problem)}
    return found


def validate(plan: Plan, catalog: Catalog, device: Device) -> None:
    """Raise if this process cannot carry out what a plan says of its device."""
    for place, problem in plan:
        choice = plan.choices[place, problem]
        if place != device.fingerprint or choice.implementation == REFERENCE_ID:
            continue
        if problem.phase == SCHEME:
            names = [scheme.name for scheme in catalog.op(problem.op).schemes]
            if choice.implementation.removeprefix("scheme:") not in names:
                raise PlanError(f"{problem.op} has no {choice.implementation}", candidates=names)
            continue
        implementation = catalog.find(problem.op, problem.scheme, problem.phase, choice.implementation)
        implementation.space.parse(choice.config)
