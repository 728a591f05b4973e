"""Candidates: every implementation and config that is legal for a problem on a device, and why the others are not."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liger_registry.config import Config
from liger_registry.foreign import TimeUpError, deadline
from liger_registry.implementation import Implementation
from liger_registry.problem import Problem
from liger_registry.table import Choice

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.device import Device

#: Configs of one implementation that are tried at most; a table keeps as many samples.
MOST = 64
#: How long a plugin may take to say which of its configs are legal for a problem, in seconds.
ASK_S = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation with one config.

    Attributes:
        implementation: the implementation.
        config: the config.
        heuristic: whether it is the config that the implementation's own heuristic names, and may serve untuned.
    """

    implementation: Implementation
    config: Config
    heuristic: bool = False

    @property
    def choice(self) -> Choice:
        """What a table holds of it."""
        return Choice(self.implementation.id, self.config)

    def __str__(self) -> str:
        return str(self.choice)


@dataclass(frozen=True, slots=True)
class Rejected:
    """What cannot be tried.

    Attributes:
        choice: as text, ``cuda:row(num_warps=4)``, or the implementation's id alone.
        reason: why.
    """

    choice: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """What can be tried for a problem on a device.

    Attributes:
        legal: in the order in which the heuristic tier would take implementations, each one's heuristic config first.
        rejected: the others.
    """

    legal: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def default(self) -> Candidate | None:
        """What serves without tuning: the first legal implementation with its heuristic's config."""
        return next((c for c in self.legal if c.heuristic), None)


def candidates(catalog: Catalog, problem: Problem, device: Device, budget: int | None = None) -> Candidates:
    """Everything that may serve a forward or backward problem on a device.

    Args:
        catalog: what is registered.
        problem: the problem; a ``budget`` among its flags is the limit of bytes beyond the outputs.
        device: the device.
        budget: that limit, in place of the problem's own.
    """
    limit: int | None = problem.flags.get("budget") if budget is None else budget  # type: ignore[assignment]
    legal: list[Candidate] = []
    rejected: list[Rejected] = []
    for implementation in in_order(catalog, problem):
        # A plugin's heuristic and predicates run in this process: one that hangs is no candidate.
        asked = f"{implementation.id} of {implementation.distribution}, asked for its configs,"
        try:
            with nullcontext() if implementation.own else deadline(ASK_S, asked):
                mine, without = _of(implementation, problem, device, limit)
        except TimeUpError as error:
            mine, without = [], [Rejected(implementation.id, str(error))]
        legal += mine
        rejected += without
    return Candidates(tuple(legal), tuple(rejected))


def _of(
    implementation: Implementation, problem: Problem, device: Device, limit: int | None
) -> tuple[list[Candidate], list[Rejected]]:
    """What one implementation may serve with, its heuristic's config first, and the rest."""
    reason = implementation.capability.why_not(problem, device)
    heuristic = reason if reason is not None else implementation.propose(problem, device)
    if isinstance(heuristic, str):
        return [], [Rejected(implementation.id, heuristic)]
    rejected: list[Rejected] = []
    found: list[Config] = []
    for config in dict.fromkeys((heuristic, *implementation.configs(problem, device))):
        reason = implementation.why_illegal(config, problem, device, limit)
        if reason is None:
            found.append(config)
        else:
            rejected.append(Rejected(str(Choice(implementation.id, config)), reason))
    kept = cap(found, heuristic)
    rejected += [
        Rejected(str(Choice(implementation.id, c)), f"more than {MOST} are legal; a sample is tried")
        for c in found
        if c not in kept
    ]
    serves = implementation.why_not_untuned(problem, device) is None
    return [Candidate(implementation, config, serves and config == heuristic) for config in kept], rejected


def in_order(catalog: Catalog, problem: Problem) -> list[Implementation]:
    """The implementations of a problem's phase in the order in which the heuristic tier tries them."""
    return catalog.in_order(problem)


def cap(configs: Sequence[Config], heuristic: Config, most: int = MOST) -> list[Config]:
    """At most ``most`` of the configs: the heuristic's, and one of each of as many equal stretches of the others.

    Within a stretch the text's hash decides. Taking every n-th instead would always leave out the same values of the
    parameter that varies fastest.
    """
    kept = [c for c in configs if c == heuristic]
    others = [c for c in configs if c != heuristic]
    room = most - len(kept)
    if len(others) <= room:
        return [*kept, *others]
    if room < 1:
        return kept
    bounds = [len(others) * n // room for n in range(room + 1)]
    for start, end in itertools.pairwise(bounds):
        kept.append(min(others[start:end], key=lambda c: hashlib.sha256(c.text.encode()).digest()))
    return kept
