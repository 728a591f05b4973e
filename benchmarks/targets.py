"""Targets that a machine can hold figures against: a ratio or a value, its limit, and what became of it.

Figures are named ``candidate.quantity``, such as ``ours.ms`` or ``liger.extra_gib``; ``bound.ms`` is the least time
that the bytes or the products of a row take at the rates measured in the same run. A figure of another row is
``row:candidate.quantity``. A claim is a ratio within one run, because absolute times move from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: The part of a target below which it is missed by more than a step can hide.
FLOOR = 0.9
#: The part of all targets that must be met.
SHARE = 0.9
MET, SHORT, BELOW, UNKNOWN = "met", "short", "below .9", "not measured"

Lookup = Callable[[str], "float | None"]


@dataclass(frozen=True, slots=True)
class Target:
    """A limit on a figure, or on the ratio of two.

    Attributes:
        figure: what is held to it.
        limit: the limit.
        over: what the figure is divided by; the figure itself counts if empty.
        least: whether the limit is the least that the value may be, not the most.
        less: what is taken off the figure first.
    """

    figure: str
    limit: float
    over: str = ""
    least: bool = False
    less: str = ""

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"a limit of {self.limit} leaves nothing to be short of")

    @property
    def kind(self) -> str:
        """What is compared, in words."""
        said = f"{self.figure} - {self.less}" if self.less else self.figure
        return f"{said} / {self.over}" if self.over else said

    @property
    def text(self) -> str:
        """The target in one line."""
        return f"{self.kind} {'>=' if self.least else '<='} {self.limit:g}"

    def value(self, figure: Lookup) -> float | None:
        """What is compared with the limit; None where a figure it takes was not measured."""
        values = {name: figure(name) for name in (self.figure, self.over, self.less) if name}
        known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
        if known.keys() != values.keys():
            return None
        top = known[self.figure] - known.get(self.less, 0.0)
        if not self.over:
            return top
        # Times and memory are positive; what is not was not measured, such as a difference of two noisy times.
        return top / known[self.over] if top > 0 and known[self.over] > 0 else None

    def judge(self, figure: Lookup) -> Verdict:
        """What the figures say."""
        value = self.value(figure)
        if value is None:
            return Verdict(self, None, None, UNKNOWN)
        # Limits are positive, so that a value of zero or less is under any.
        score = value / self.limit if self.least else math.inf if value <= 0 else self.limit / value
        word = MET if score >= 1 else SHORT if score >= FLOOR else BELOW
        return Verdict(self, value, score, word)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a target.

    Attributes:
        target: the target.
        value: what was compared with its limit; None if a figure is missing.
        score: 1 where the value is the limit, more where it is better; None likewise.
        word: met, short, below .9, or not measured.
    """

    target: Target
    value: float | None
    score: float | None
    word: str

    @property
    def text(self) -> str:
        """The verdict in words: ``met``, or by how much it falls short."""
        if self.word not in (SHORT, BELOW) or self.score is None:
            return self.word
        short = f"short by {1 - self.score:.1%}"
        return short if self.word == SHORT else f"{BELOW}, {short}"

    def to_json(self) -> dict[str, object]:
        """The verdict as JSON values."""
        score = None if self.score is None or math.isinf(self.score) else self.score
        return {
            "target": self.target.text,
            "limit": self.target.limit,
            "value": self.value,
            "score": score,
            "verdict": self.word,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Tally:
    """How many targets were met, and whether that is enough."""

    met: int
    short: int
    below: int
    unknown: int

    @classmethod
    def of(cls, words: Iterable[str]) -> Tally:
        """The tally of some verdicts' words."""
        counted = list(words)
        return cls(*(counted.count(word) for word in (MET, SHORT, BELOW, UNKNOWN)))

    @property
    def judged(self) -> int:
        """How many were measured."""
        return self.met + self.short + self.below

    @property
    def passed(self) -> bool:
        """At least nine of ten met, none under .9, and all of them measured."""
        return self.unknown == 0 and self.below == 0 and self.judged > 0 and self.met >= SHARE * self.judged

    @property
    def text(self) -> str:
        """The tally in one line."""
        share = f" ({self.met / self.judged:.0%})" if self.judged else ""
        return f"{self.met} of {self.judged} met{share}, {self.below} below .9, {self.unknown} not measured"


def share(limit: float) -> Target:
    """Our part of the bound's rate, at least."""
    return Target("bound.ms", limit, "ours.ms", least=True)


def times(peer: str, limit: float) -> Target:
    """Our time as a part of a peer's, at most."""
    return Target("ours.ms", limit, f"{peer}.ms")


def extra(limit: float) -> Target:
    """Our extra memory in GiB, at most."""
    return Target("ours.extra_gib", limit)


def extra_of(peer: str, limit: float) -> Target:
    """Our extra memory as a part of a peer's, at most."""
    return Target("ours.extra_gib", limit, f"{peer}.extra_gib")


def own(row: str, limit: float) -> Target:
    """Our time as a part of our time in another row, at most."""
    return Target("ours.ms", limit, f"{row}:ours.ms")
