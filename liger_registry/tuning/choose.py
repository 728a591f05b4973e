"""Which of the finalists serves: rules without state, so that two runs that measure alike choose alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from liger_registry.table import Choice
from liger_registry.tuning.candidates import Candidate
from liger_registry.tuning.measure import DRIFT
from liger_registry.tuning.outcome import Outcome
from liger_registry.tuning.schemes import GAIN

#: In a block that stayed noisy the gain must exceed the noise by this factor. A factor, not a ban: the clock of a
#: shared CPU is never quiet, and a default that is three times as slow is still worth replacing there.
NOISY_FACTOR = 3.0
#: Finalists this close to the fastest are its equals, of which the first in declared order is chosen.
EQUAL = 0.01


def choose(times: Mapping[Choice, float], default: Choice, declared: Iterable[Choice], least: float) -> Choice:
    """The choice among finalists.

    Args:
        times: of each finalist, in microseconds.
        default: one of them, which stays unless another gains more than ``least``.
        declared: all choices in declared order.
        least: the relative gain that replaces the default, 0.02 for 2 %.
    """
    better = {c: time for c, time in times.items() if c != default and 1 - time / times[default] > least}
    limit = (1 + EQUAL) * min(better.values(), default=math.inf)
    return next((c for c in declared if c in better and better[c] <= limit), default)


def least_gain(outcomes: Sequence[Outcome]) -> float:
    """The relative gain that replaces a default, of finalists that were timed in turn."""
    return max(GAIN, noise_of(outcomes) * (NOISY_FACTOR if is_noisy(outcomes) else 1.0))


def noise_of(outcomes: Sequence[Outcome]) -> float:
    """The relative noise that a comparison of candidates that were timed in turn is subject to."""
    return max(max(o.drift, o.noise) for o in outcomes)


def is_noisy(outcomes: Sequence[Outcome]) -> bool:
    """Whether the machine changed while they were timed, or others used it."""
    return any(o.drift > DRIFT or o.foreign for o in outcomes)


def standard(default: Candidate, able: Sequence[Candidate], legal: Iterable[Candidate]) -> Candidate:
    """The default; if it does not work here, the next in order that does, which is then what serves without tuning."""
    if default in able:
        return default
    return next((c for c in legal if c.heuristic and c in able), able[0])
