"""``linear_logp`` by slabs: what each implementation can do, and which configs it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Config, ConfigSpace, Implementation
from liger_registry.kernels import linear_heuristics as h
from liger_registry.portable.spaces._linear import (
    VOCAB_SLABS,
    row_stages,
    vocab_bytes,
    vocab_heuristic,
    vocab_stages,
)

if TYPE_CHECKING:
    from liger_registry import Device, Problem

_LAUNCH = "liger_registry.portable.linear_logp:"
_FLAGS = {"entropy": lambda problem: bool(problem.entropy), "predict": lambda problem: bool(problem.argmax)}


def _distinct(config: Config, problem: Problem, device: Device) -> bool:
    return config.slab_rows == h.SLAB_ROWS[0] or int(config.slab_rows) < 2 * int(problem.tokens)


def _rows(problem: Problem, config: Config) -> int:
    return min(int(config.slab_rows), int(problem.tokens))


def _row_bytes(problem: Problem, config: Config) -> int:
    return h.row_slab_bytes(problem, int(config.slab_rows))


def _row_heuristic(problem: Problem, device: Device) -> Config:
    legal = [c for n in h.SLAB_ROWS if _distinct(c := Config(slab_rows=n), problem, device)]
    fit = [c for c in legal if int(c.slab_rows) <= h.LEAST_ROWS and h.within(problem, _row_bytes(problem, c))]
    return fit[-1] if fit else legal[0]


IMPLEMENTATIONS = (
    Implementation(
        op="linear_logp",
        scheme="recompute",
        phase="forward",
        name="vocab_slabs",
        launch=_LAUNCH + "forward_vocab_slabs",
        space=VOCAB_SLABS,
        heuristic=vocab_heuristic,
        extra_bytes=vocab_bytes,
        stages=vocab_stages("forward", **_FLAGS),
        doc="slabs of the vocabulary, whose statistics are put together",
    ),
    Implementation(
        op="linear_logp",
        scheme="recompute",
        phase="forward",
        name="row_slabs",
        launch=_LAUNCH + "forward_row_slabs",
        space=ConfigSpace(slab_rows=list(h.SLAB_ROWS)).where(_distinct, "the slab has more rows than there are"),
        heuristic=_row_heuristic,
        extra_bytes=_row_bytes,
        stages=row_stages(_rows, "forward", **_FLAGS),
        doc="slabs of rows, each with the whole vocabulary",
    ),
    Implementation(
        op="linear_logp",
        scheme="recompute",
        phase="backward",
        name="vocab_slabs",
        launch=_LAUNCH + "backward_vocab_slabs",
        space=VOCAB_SLABS,
        heuristic=vocab_heuristic,
        extra_bytes=vocab_bytes,
        stages=vocab_stages("backward", **_FLAGS),
        doc="slabs of the vocabulary, each of which completes its rows of the head's gradient",
    ),
)
