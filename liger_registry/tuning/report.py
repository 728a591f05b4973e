"""What a tuning run did, row by row."""

from __future__ import annotations

from dataclasses import dataclass

from liger_registry.problem import Problem
from liger_registry.table import Choice

#: A candidate replaced the default; the default won; noise kept the default; an earlier run had answered.
TUNED, DEFAULT, NOISE, REUSED = "tuned", "default", "noisy", "reused"
#: Nothing was decided: no candidate passed; nothing is legal; the time was up; a CPU would take too long.
FAILED, NOTHING, UNTUNED, TOO_SLOW = "failed", "no implementation", "untuned", "too slow here"


@dataclass(frozen=True, slots=True)
class Row:
    """One problem of a run.

    Attributes:
        problem: the problem.
        status: one of the words above.
        choice: what was chosen; None if nothing was.
        default: what serves without tuning.
        time_us: the choice's time in microseconds.
        default_us: the default's time in microseconds.
        measured: candidates that were tried in this run.
        reused: candidates whose samples an earlier run had left.
        detail: why, in one line.
    """

    problem: Problem
    status: str
    choice: Choice | None = None
    default: Choice | None = None
    time_us: float | None = None
    default_us: float | None = None
    measured: int = 0
    reused: int = 0
    detail: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster the choice is than the default."""
        return self.default_us / self.time_us if self.time_us and self.default_us else None


@dataclass(frozen=True, slots=True)
class TuneReport:
    """A run.

    Attributes:
        rows: one a problem, in the order in which they were given.
        seconds: how long it took.
        device: the device's fingerprint.
    """

    rows: tuple[Row, ...]
    seconds: float
    device: str

    @property
    def untuned(self) -> tuple[Problem, ...]:
        """The problems that the time did not suffice for."""
        return tuple(row.problem for row in self.rows if row.status == UNTUNED)

    @property
    def measured(self) -> int:
        """Candidates that were tried in this run."""
        return sum(row.measured for row in self.rows)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        problem: what is being tuned.
        done: problems that are done.
        total: problems in all.
        text: what is being done, such as the candidate's name.
        row: the problem's row, once it is done.
    """

    problem: Problem
    done: int
    total: int
    text: str = ""
    row: Row | None = None
