"""Freezing: one plan for a job, from the tables its ranks can read and the calls they have made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from liger_registry.decision import SHIPPED_TABLES, Terms
from liger_registry.dispatch import Dispatcher
from liger_registry.errors import PlanError
from liger_registry.implementation import REFERENCE_ID
from liger_registry.plan import Exchange, Plan, agree
from liger_registry.problem import SCHEME, Problem
from liger_registry.table import Choice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from liger_registry.catalog import Catalog
    from liger_registry.device import Device


def make_plan(
    dispatcher: Dispatcher,
    device: Device,
    group: ProcessGroup | None,
    problems: Callable[[], Iterable[Problem]],
    terms: Callable[[Problem], Terms],
) -> Plan:
    """The plan that all ranks of a group agree on.

    Args:
        dispatcher: decides on this rank; without a plan of its own.
        device: this rank's device.
        group: a process group; None for the default one, or for this process alone.
        problems: what this rank wants decided.
        terms: under which terms it decides a problem.

    Raises:
        PlanError: a rank could not decide or cannot carry the plan out; raised on every rank.
    """

    def resolve(problem: Problem) -> Choice:
        if problem.phase == SCHEME:
            return dispatcher.decide_scheme(problem, device, []).choice
        return dispatcher.decide(problem, device, terms(problem), []).choice

    return agree(
        Exchange(group), device.fingerprint, problems, resolve, lambda plan: validate(plan, dispatcher.catalog, device)
    )


def tabled(dispatcher: Dispatcher, device: Device) -> set[Problem]:
    """The problems in the tables this process can read, as far as the contracts still have such problems."""
    found: set[Problem] = set()
    for op in dispatcher.catalog.ops():
        for source in dispatcher.sources if dispatcher.mode != "off" else ():
            tables = [source.store.load(device, op.name)]
            if source.kind == SHIPPED_TABLES:
                tables += source.store.siblings(device, op.name)
            found |= {problem for table in tables for problem in table.problems if op.has(problem)}
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
