"""Slabs of whole groups of tokens: what they cost, and which are tried. Needs no torch.

A slab takes groups until it has its number of rows, so that it has at most that many and a group's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry.config import Config
from liger_registry.kernels import linear_heuristics as h
from liger_registry.problem import budget_for

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.problem import Problem

SUMS = ("input", "float32")


def most_rows(problem: Problem, slab_rows: int) -> int:
    """The most rows that a slab may have."""
    return min(slab_rows + int(problem.group), max(int(problem.tokens), 1))


def slab_bytes(problem: Problem, config: Config) -> int:
    """Bytes of an implementation over slabs of groups; groups are gathered, which copies hidden states once more."""
    rows = most_rows(problem, int(config.slab_rows))
    return h.row_slab_bytes(problem, rows, config.get("sums") == "float32")


def default_budget(problem: Problem) -> int:
    """What the default slab takes, or one of the vocabulary, as a budget class, so that shapes nearby share a key.

    A group of more rows than that slab is not meant to fit: two slabs' rows are the most.
    """
    rows = h.default_rows(int(problem.tokens))
    most = min(rows + min(int(problem.group), rows), max(int(problem.tokens), 1))
    cost = max(h.row_slab_bytes(problem, most), h.vocab_budget(problem))
    return budget_for(cost)


def heuristic(problem: Problem, device: Device) -> Config:
    """The default slab, or the largest below it within the budget; summed in fp32 only where it has to be."""
    most = h.default_rows(int(problem.tokens))
    found = [
        config
        for rows in reversed(h.SLAB_ROWS)
        for sums in SUMS
        if distinct(config := Config(slab_rows=rows, sums=sums), problem, device)
        and h.few_roundings(config, problem, device)
    ]
    usual = [c for c in found if int(c.slab_rows) <= most] or found
    fit = [c for c in usual if h.within(problem, slab_bytes(problem, c))]
    return next(iter(fit or usual[-1:]), Config(slab_rows=h.SLAB_ROWS[0], sums="float32"))


def distinct(config: Config, problem: Problem, device: Device) -> bool:
    """Whether a slab is not all rows, or is the smallest there is."""
    return config.slab_rows == h.SLAB_ROWS[0] or int(config.slab_rows) < int(problem.tokens)
