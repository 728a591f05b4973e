"""``fused_linear_cross_entropy`` by slabs: what each implementation can do, and which configs it has.

PyTorch's own is in ``torch_linear_cross_entropy``.
"""

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

OP = "fused_linear_cross_entropy"
_LAUNCH = "liger_registry.portable.fused_linear_cross_entropy:"
_FLAGS = {"weighted": lambda problem: bool(problem.smoothed), "predict": lambda problem: bool(problem.predict)}
_SUMS = ("input", "float32")


def _chunk_bytes(problem: Problem, config: Config) -> int:
    return h.row_slab_bytes(problem, int(config.slab_rows), config.get("sums") == "float32")


def _single_bytes(problem: Problem, config: Config) -> int:
    return h.row_slab_bytes(problem, int(problem.tokens))


def _all(problem: Problem, config: Config) -> int:
    return int(problem.tokens)


def _rows(problem: Problem, config: Config) -> int:
    return min(int(config.slab_rows), int(problem.tokens))


def _chunk_heuristic(problem: Problem, device: Device) -> Config:
    """The default slab, or the largest below it within the budget; summed in fp32 only where it has to be."""
    most = h.usual_rows(problem)
    found = [
        config
        for rows in reversed(h.SLAB_ROWS)
        for sums in _SUMS
        if h.distinct_rows(config := Config(slab_rows=rows, sums=sums), problem, device)
        and h.few_roundings(config, problem, device)
    ]
    usual = [c for c in found if int(c.slab_rows) <= most] or found
    fit = [c for c in usual if h.within(problem, _chunk_bytes(problem, c))]
    return next(iter(fit or usual), Config(slab_rows=h.SLAB_ROWS[0], sums="float32"))


def _row_distinct(config: Config, problem: Problem, device: Device) -> bool:
    return config.slab_rows == h.SLAB_ROWS[0] or int(config.slab_rows) < 2 * int(problem.tokens)


def _row_heuristic(problem: Problem, device: Device) -> Config:
    legal = [c for n in h.SLAB_ROWS if _row_distinct(c := Config(slab_rows=n), problem, device)]
    fit = [c for c in legal if int(c.slab_rows) <= h.LEAST_ROWS and h.within(problem, _chunk_bytes(problem, c))]
    return fit[-1] if fit else legal[0]


_CHUNKS = (
    ConfigSpace(slab_rows=list(h.SLAB_ROWS), sums=list(_SUMS))
    .where(h.distinct_rows, "one slab holds all rows")
    .where(h.few_roundings, "the head's gradient would be rounded more often than the call allows")
)
IMPLEMENTATIONS = (
    Implementation(
        op=OP,
        scheme="grad_in_forward",
        phase="forward",
        name="single",
        launch=_LAUNCH + "forward_single",
        extra_bytes=_single_bytes,
        stages=row_stages(_all, "forward", "backward", **_FLAGS),
        untuned=h.why_not_untuned,
        doc="one slab of all rows",
    ),
    Implementation(
        op=OP,
        scheme="grad_in_forward",
        phase="forward",
        name="chunked",
        launch=_LAUNCH + "forward_chunked",
        space=_CHUNKS,
        heuristic=_chunk_heuristic,
        extra_bytes=_chunk_bytes,
        stages=row_stages(_rows, "forward", "backward", **_FLAGS),
        doc="slabs of rows, over which the head's gradient is summed",
    ),
    Implementation(
        op=OP,
        scheme="grad_in_forward",
        phase="forward",
        name="vocab_slabs",
        launch=_LAUNCH + "forward_vocab_slabs",
        space=VOCAB_SLABS,
        heuristic=vocab_heuristic,
        extra_bytes=vocab_bytes,
        stages=vocab_stages("forward", "backward", **_FLAGS),
        doc="slabs of the vocabulary, twice: the least memory, for four products instead of three",
    ),
    Implementation(
        op=OP,
        scheme="grad_in_forward",
        phase="backward",
        name="scale",
        launch=_LAUNCH + "backward_scale",
        extra_bytes=h.scale_bytes,
        doc="forward's gradients times the loss', in place",
    ),
    Implementation(
        op=OP,
        scheme="recompute",
        phase="forward",
        name="vocab_slabs",
        launch=_LAUNCH + "forward_recompute_vocab",
        space=VOCAB_SLABS,
        heuristic=vocab_heuristic,
        extra_bytes=vocab_bytes,
        stages=vocab_stages("forward", **_FLAGS),
        doc="slabs of the vocabulary, whose statistics are put together",
    ),
    Implementation(
        op=OP,
        scheme="recompute",
        phase="forward",
        name="row_slabs",
        launch=_LAUNCH + "forward_recompute_rows",
        space=ConfigSpace(slab_rows=list(h.SLAB_ROWS)).where(_row_distinct, "the slab has more rows than there are"),
        heuristic=_row_heuristic,
        extra_bytes=_chunk_bytes,
        stages=row_stages(_rows, "forward", **_FLAGS),
        doc="slabs of rows, each with the whole vocabulary",
    ),
    Implementation(
        op=OP,
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
