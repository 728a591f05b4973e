"""Plans: a frozen, digested set of decisions for one job, equal on every rank.

``agree`` is the only place of this package that uses collectives. It is called once by every rank, and a rank that
fails in it says so to the others instead of leaving them to wait.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liger_registry.config import Config
from liger_registry.errors import PlanError, TableInvalidError
from liger_registry.problem import Problem, scalar_fields
from liger_registry.table import Choice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions by device fingerprint and problem.

    Attributes:
        choices: ``(fingerprint, problem)`` to the choice.
        digest: 64 hex digits over the canonical text; equal plans have equal digests, others do not.
    """

    choices: Mapping[tuple[str, Problem], Choice]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", dict(self.choices))
        text = json.dumps(self._lines(), sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def get(self, fingerprint: str, problem: Problem) -> Choice | None:
        """The choice for a problem on a device; None if the plan holds none."""
        return self.choices.get((fingerprint, problem))

    def __len__(self) -> int:
        return len(self.choices)

    def __iter__(self) -> Iterator[tuple[str, Problem]]:
        return iter(self.choices)

    def _lines(self) -> list[dict[str, Any]]:
        lines = [
            {
                "device": fingerprint,
                "op": problem.op,
                **problem.to_json(),
                "implementation": choice.implementation,
                "config": dict(choice.config),
            }
            for (fingerprint, problem), choice in self.choices.items()
        ]
        return sorted(lines, key=lambda line: json.dumps(line, sort_keys=True))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON, to be kept beside a checkpoint."""
        return {"schema": SCHEMA, "digest": self.digest, "decisions": self._lines()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """The plan that a JSON document holds.

        Raises:
            PlanError: another schema, an entry that does not validate, or a digest that does not match.
        """
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            raise PlanError("the document is no plan of this version", why=f"schema {SCHEMA} is wanted")
        choices = {}
        lines = document.get("decisions")
        try:
            for line in lines if isinstance(lines, list) else ():
                problem = Problem.from_json(str(line["op"]), line)
                choices[str(line["device"]), problem] = Choice(
                    str(line["implementation"]), Config(scalar_fields(line["config"], "config"))
                )
        except (TableInvalidError, KeyError, TypeError) as error:
            raise PlanError("the plan has an entry that does not validate", why=str(error)) from None
        plan = cls(choices)
        if plan.digest != document.get("digest"):
            raise PlanError("the plan's digest does not match its decisions", fix="freeze() again")
        return plan


@dataclass(frozen=True, slots=True)
class Exchange:
    """The ranks of a process group, or this process alone."""

    group: ProcessGroup | None = None

    def all(self, value: object) -> list[Any]:
        """What every rank gave, by rank."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:  # the group's own timeout, or a connection that was closed
            raise PlanError(
                "the ranks could not exchange their plans: one of them has died or did not call freeze()",
                why=str(error),
                fix="let every rank of the group call freeze() once, and start the job again",
            ) from error
        return values

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        import torch.distributed as dist

        return dist.get_rank(self.group) if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank brings to an agreement.

    Attributes:
        fingerprint: of its device.
        problems: what it wants decided.
        resolve: the choice for a problem on its device; asked on the lowest rank of each fingerprint alone.
        validate: raises if the rank cannot carry the plan out.
    """

    fingerprint: str
    problems: Callable[[], Iterable[Problem]]
    resolve: Callable[[Problem], Choice]
    validate: Callable[[Plan], None]


def agree(exchange: Exchange, prepare: Callable[[], Part]) -> Plan:
    """One plan on every rank of a group.

    Args:
        exchange: the ranks.
        prepare: makes this rank's part. Whatever may fail on one rank alone belongs in it, or in what it returns:
            settings, the device, plugins.

    Returns:
        The plan, the same on every rank.

    Raises:
        PlanError: a rank could not; every rank raises it and names the rank.
    """
    made: list[Part] = []

    def needed() -> tuple[str, list[Problem]]:
        part = prepare()
        made.append(part)
        found = list(part.problems())
        if wrong := [p for p in found if not isinstance(p, Problem)]:
            raise TypeError(f"{wrong[0]!r} is no Problem")
        pickle.dumps(found)  # what cannot be sent must not fail in the middle of the exchange
        return part.fingerprint, found

    wanted = exchange.all(_guarded(needed))
    _raise_first(wanted, "could not say what it needs")
    union = sorted({p for _, (_, ps) in wanted for p in ps}, key=lambda p: p.text)
    part, fingerprint = made[0], made[0].fingerprint
    lowest = min(rank for rank, (_, (place, _)) in enumerate(wanted) if place == fingerprint)

    def mine() -> list[tuple[str, Problem, Choice]]:
        return [(fingerprint, p, part.resolve(p)) for p in union] if exchange.rank == lowest else []

    resolved = exchange.all(_guarded(mine))
    _raise_first(resolved, "could not decide")
    plan = Plan({(place, p): choice for _, lines in resolved for place, p, choice in lines})

    def check() -> str:
        part.validate(plan)
        return plan.digest

    digests = exchange.all(_guarded(check))
    _raise_first(digests, "cannot carry the plan out")
    if len({digest for _, digest in digests}) > 1:
        raise PlanError("the ranks hold different plans", why=", ".join(digest[:12] for _, digest in digests))
    return plan


def _guarded(action: Callable[[], Any]) -> tuple[str, Any]:
    """``("", result)``, or the error's text and None: a rank that raised would leave the others in the collective."""
    try:
        return "", action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def _raise_first(answers: list[tuple[str, Any]], what: str) -> None:
    for rank, (error, _) in enumerate(answers):
        if error:
            raise PlanError(f"rank {rank} {what}", why=error, fix="mend that rank and call freeze() again")
