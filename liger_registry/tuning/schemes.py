"""Choosing a scheme: the one with the smallest sum of its best forward and its best backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from liger_registry.config import Config
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.table import Choice, Provenance, Stored
from liger_registry.tuning.report import DEFAULT, NOTHING, REUSED, TOO_SLOW, TUNED, UNTUNED, Row

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.device import Device
    from liger_registry.store import TableStore

#: A gain below this is not worth another choice than everybody's.
GAIN = 0.02


class Phases(Protocol):
    """What a scheme's decision needs of a run."""

    catalog: Catalog
    device: Device
    store: TableStore
    protocol: str

    def tune(self, problem: Problem) -> Row:
        """The row of one of the scheme's phases."""


def scheme_row(run: Phases, problem: Problem) -> Row:
    """Tune the phases of every scheme, and persist which scheme is best.

    Args:
        run: tunes the phases.
        problem: of phase ``scheme``.

    Returns:
        Its row. The default is the first scheme all of whose phases have an answer, with its phases tuned too: what is
        compared is schemes, not configs.
    """
    op = run.catalog.op(problem.op)
    if len(op.schemes) < 2:
        return Row(problem, NOTHING, detail=f"{op.name} has one scheme")
    rows: list[Row] = []
    totals: dict[Choice, float] = {}
    parts: dict[Choice, list[Stored]] = {}
    for scheme in op.schemes_for(op.options_of(problem)):
        flags = problem.flags if scheme.gradients else problem.flags.without("needs")
        forward = replace(problem, scheme=scheme.name, phase=FORWARD, flags=flags)
        backward = replace(problem, scheme=scheme.name, phase=BACKWARD)
        # Without a gradient there is no backward, and the cheapest forward decides.
        phases = (forward, backward) if any(op.needs(backward)) else (forward,)
        mine: list[Row] = []
        for phase in phases:
            mine.append(run.tune(phase))
            if mine[-1].status == TOO_SLOW:
                break  # its backward takes as long, and holding that against float64 takes minutes
        rows += mine
        table = run.store.load(run.device, op.name)
        found = [stored for phase in phases if (stored := table.decision(phase, run.protocol)) is not None]
        if len(found) == len(phases) == len(mine) and all(row.choice is not None for row in mine):
            choice = Choice(f"scheme:{scheme.name}", Config())
            parts[choice], totals[choice] = found, sum(stored.time_us for stored in found)
    open_rows = [row for row in rows if row.choice is None]
    untuned = next((row for row in open_rows if row.status == UNTUNED), None)
    if untuned is not None or not totals:
        worst = untuned or open_rows[0]
        return Row(problem, worst.status, detail=f"{worst.problem.text}: {worst.detail}")
    default, winner = next(iter(totals)), min(totals, key=lambda choice: totals[choice])
    noise = max(stored.noise for choice in (default, winner) for stored in parts[choice])
    if 1 - totals[winner] / totals[default] <= max(GAIN, noise):
        winner = default
    decision = Stored(
        problem, winner, totals[winner], default, totals[default], noise, run.protocol, _provenance(parts[winner])
    )
    known = run.store.load(run.device, op.name).decision(problem, run.protocol)
    if known != decision:
        run.store.record(run.device, op.name, decisions=[decision])
    reused = known == decision and all(row.status == REUSED for row in rows)
    status = REUSED if reused else DEFAULT if winner == default else TUNED
    return Row(problem, status, winner, default, totals[winner], totals[default])


def _provenance(parts: Sequence[Stored]) -> Provenance:
    """That of the parts: what changes for one of them changes for the scheme."""
    latest = max((stored.provenance for stored in parts), key=lambda provenance: provenance.date)
    return replace(latest, source="+".join(stored.provenance.source for stored in parts))
