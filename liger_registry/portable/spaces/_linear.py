"""Losses over a linear head: config spaces and stages that several operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from liger_registry import Config, ConfigSpace
from liger_registry.kernels import linear_heuristics as h

if TYPE_CHECKING:
    from liger_registry import Device, Problem

    Stages = Mapping[str, Problem]

#: Slabs of the vocabulary; of a tiny one many are the same.
VOCAB_SLABS = ConfigSpace(slabs=list(h.VOCAB_SLABS)).where(h.distinct_columns, "fewer slabs are the same ones")


def vocab_bytes(problem: Problem, config: Config) -> int:
    """Peak bytes over slabs of the vocabulary; the most slabs are legal within any budget.

    A budget that holds no slabs at all would be answered by the reference, which holds all logits.
    """
    found, budget = h.vocab_slab_bytes(problem, int(config.slabs)), problem.flags.get("budget")
    columns = h.slab_columns(int(problem.vocab), int(config.slabs))
    most = columns == h.slab_columns(int(problem.vocab), h.VOCAB_SLABS[-1])
    return min(found, budget) if most and isinstance(budget, int) else found


def vocab_heuristic(problem: Problem, device: Device) -> Config:
    """The fewest slabs, none of less than 8,192 columns unless the budget asks for it."""
    legal = [c for n in h.VOCAB_SLABS if h.distinct_columns(c := Config(slabs=n), problem, device)]
    wide = [c for c in legal if int(c.slabs) == 1 or h.slab_columns(int(problem.vocab), int(c.slabs)) >= h.FULL_COLUMNS]
    for config in reversed(wide):
        if h.within(problem, vocab_bytes(problem, config)):
            return config
    return next((c for c in legal if h.within(problem, vocab_bytes(problem, c))), legal[-1])


def vocab_stages(*phases: str, **flags: Callable[[Problem], bool]) -> Callable[[Problem, Config], Stages]:
    """The stages on slabs of the vocabulary.

    Args:
        phases: ``forward`` for the statistics, ``backward`` for the gradient.
        flags: those of the stage, from the problem; ``predict`` is for the statistics alone.
    """

    def stages(problem: Problem, config: Config) -> Stages:
        columns = h.slab_columns(int(problem.vocab), int(config.slabs))
        return stages_of(problem, int(problem.tokens), columns, phases, flags)

    return stages


def row_stages(
    rows: Callable[[Problem, Config], int], *phases: str, **flags: Callable[[Problem], bool]
) -> Callable[[Problem, Config], Stages]:
    """The stages on slabs of rows; arguments as of ``vocab_stages``, and how many rows a slab has."""
    return lambda problem, config: stages_of(problem, rows(problem, config), int(problem.vocab), phases, flags)


def stages_of(
    problem: Problem, rows: int, columns: int, phases: tuple[str, ...], flags: Mapping[str, Callable[[Problem], bool]]
) -> Stages:
    """The problems of ``logit_statistics`` on slabs of some size."""
    found: dict[str, Problem] = {}
    on = {name: flag(problem) for name, flag in flags.items()}
    if "forward" in phases:
        found["statistics"] = h.stage_problem(problem, "forward", rows, columns, **on)
    if "backward" in phases:
        on = {**on, "predict": False, "in_place": True}
        found["gradient"] = h.stage_problem(problem, "backward", rows, columns, **on)
    return found
