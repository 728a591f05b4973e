"""How far two independent warmups agree: the same choice, or one that costs at most 2 % by the other run's times.

python benchmarks/agreement.py FIRST/.../rms_norm.json SECOND/.../rms_norm.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from liger_registry.store import read_file
from liger_registry.table import Choice, Stored, Table

LIMIT = 0.02


def cost(table: Table, stored: Stored, other: Choice) -> float | None:
    """How much longer another run's choice takes than this run's, by this run's own samples; None if it has none."""
    times = [s.time_us for s in table.samples_of(stored.problem, stored.protocol) if s.choice == other and s.time_us]
    return times[0] / stored.time_us - 1 if times else None


def main() -> None:
    """Compare, print what differs, and leave with 1 if fewer than 95 % agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs=2, type=Path)
    first, second = map(read_file, parser.parse_args().tables)
    common = [key for key in second.decisions if key in first.decisions]
    equal, agree = 0, [0, 0]
    for key in common:
        one, two = first.decisions[key], second.decisions[key]
        if one.choice == two.choice:
            equal += 1
            continue
        costs = cost(first, one, two.choice), cost(second, two, one.choice)
        for run, value in enumerate(costs):
            agree[run] += value is not None and value <= LIMIT
        told = " / ".join("-" if value is None else f"{value:+.1%}" for value in costs)
        print(f"{one.problem.text}: {one.choice} or {two.choice}: costs {told}")
    shares = [(equal + count) / len(common) for count in agree]
    told = f"by the first's times {shares[0]:.1%}, by the second's {shares[1]:.1%}"
    print(f"{equal} of {len(common)} equal; equal or within {LIMIT:.0%} {told}")
    if min(shares) < 0.95:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
