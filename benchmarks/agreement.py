"""``python -m benchmarks agreement``: how far two independent warmups agree.

The same choice, or one that costs at most 2 % by the other run's times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from liger_registry.store import read_file
from liger_registry.table import Choice, Stored, Table

LIMIT = 0.02
#: The part of the choices that has to agree.
ENOUGH = 0.95


def cost(table: Table, stored: Stored, other: Choice) -> float | None:
    """How much longer another run's choice takes than this run's, by this run's own samples; None if it has none."""
    times = [s.time_us for s in table.samples_of(stored.problem, stored.protocol) if s.choice == other and s.time_us]
    return times[0] / stored.time_us - 1 if times and stored.time_us else None


def run(one: Path, two: Path, say: Callable[[str], object] = print) -> bool:
    """Compare two tables of one operation, say what differs, and whether enough agree.

    Raises:
        ValueError: the tables have no problem in common.
    """
    first, second = read_file(one), read_file(two)
    common = [key for key in second.decisions if key in first.decisions]
    if not common:
        raise ValueError(f"{one} and {two} have no problem in common")
    equal, agree = 0, [0, 0]
    for key in common:
        mine, theirs = first.decisions[key], second.decisions[key]
        if mine.choice == theirs.choice:
            equal += 1
            continue
        costs = cost(first, mine, theirs.choice), cost(second, theirs, mine.choice)
        for place, value in enumerate(costs):
            agree[place] += value is not None and value <= LIMIT
        told = " / ".join("-" if value is None else f"{value:+.1%}" for value in costs)
        say(f"{mine.problem.text}: {mine.choice} or {theirs.choice}: costs {told}")
    shares = [(equal + count) / len(common) for count in agree]
    told = f"by the first's times {shares[0]:.1%}, by the second's {shares[1]:.1%}"
    say(f"{equal} of {len(common)} equal; equal or within {LIMIT:.0%} {told}")
    return min(shares) >= ENOUGH
