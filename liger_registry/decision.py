"""Decisions, and the words in which a choice is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from liger_registry.config import Config
from liger_registry.implementation import Implementation
from liger_registry.problem import Problem
from liger_registry.table import Choice

if TYPE_CHECKING:
    from liger_registry.store import TableStore

PINNED, PLAN, EXACT, STALE, NEAR = "pinned", "plan", "exact", "stale", "near"
SHIPPED, SHIPPED_NEAR, SIBLING, HEURISTIC, REFERENCE = "shipped", "shipped-near", "sibling", "heuristic", "reference"
TIERS = (PINNED, PLAN, EXACT, STALE, NEAR, SHIPPED, SHIPPED_NEAR, SIBLING, HEURISTIC, REFERENCE)
# Answers from any other tier are misses.
HITS = (PINNED, PLAN, EXACT, SHIPPED)
USER, CLUSTER, SHIPPED_TABLES = "user", "cluster", "shipped"
LENIENT = "pinned for both phases"


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for a problem on a device.

    Attributes:
        problem: the problem.
        implementation: the implementation chosen.
        config: its config.
        source: the tier that answered.
        detail: what of that tier, such as the sibling's SKU or the bucket that was near.
    """

    problem: Problem
    implementation: Implementation
    config: Config
    source: str
    detail: str = ""

    @property
    def choice(self) -> Choice:
        """What a table or plan holds of it."""
        return Choice(self.implementation.id, self.config)

    def __str__(self) -> str:
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.implementation.id}({self.config.text}) source={self.source}{detail}"


@dataclass(frozen=True, slots=True)
class SchemeDecision:
    """Which scheme a problem takes.

    Attributes:
        problem: the problem, of phase ``scheme``.
        scheme: the scheme's name.
        source: the tier that answered.
        detail: what of that tier.
    """

    problem: Problem
    scheme: str
    source: str
    detail: str = ""

    @property
    def choice(self) -> Choice:
        """What a table or plan holds of it."""
        return Choice(f"scheme:{self.scheme}", Config())

    def __str__(self) -> str:
        detail = f", {self.detail}" if self.detail else ""
        return f"scheme {self.scheme} source={self.source}{detail}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tier answers, before it is judged.

    Attributes:
        tier: the tier.
        choice: the choice.
        detail: what of that tier.
        local: whether the user's own table of this device says so.
    """

    tier: str
    choice: Choice
    detail: str
    local: bool = False


@dataclass(frozen=True, slots=True)
class Considered:
    """One answer that a tier gave, and what became of it.

    Attributes:
        tier: the tier.
        choice: implementation id and config; empty where the tier had no answer.
        accepted: whether it was taken.
        reason: why not, or where it came from.
    """

    tier: str
    choice: str
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Terms:
    """Under which terms a choice is made, beside problem and device.

    Attributes:
        pins: ``(op or op/phase, implementation, config or None)``, the first match counts.
        deterministic: only deterministic implementations.
        budget: bytes beyond the outputs; None for no limit.
    """

    pins: tuple[tuple[str, str, Config | None], ...] = ()
    deterministic: bool = False
    budget: int | None = None


# Nothing pinned, nothing forbidden.
FREE = Terms()


@dataclass(frozen=True, slots=True)
class Source:
    """A store of tables and its rank in the search: ``user``, ``cluster`` or ``shipped``."""

    kind: str
    store: TableStore


def differences(wanted: Problem, other: Problem) -> list[str]:
    """The fields in which two problems differ, ``rows 4096/8192``."""
    found = [
        f"{n} {getattr(wanted, n)}/{getattr(other, n)}"
        for n in ("scheme", "phase")
        if getattr(wanted, n) != getattr(other, n)
    ]
    for part in ("dims", "dtypes", "flags"):
        ours, theirs = getattr(wanted, part), getattr(other, part)
        found += [
            f"{k} {ours.get(k)}/{theirs.get(k)}" for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)
        ]
    return found
