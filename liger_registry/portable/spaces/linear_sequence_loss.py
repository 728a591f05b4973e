"""``linear_sequence_loss`` by slabs: what each implementation can do, and which configs it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import ConfigSpace, Implementation
from liger_registry.kernels import group_heuristics as g
from liger_registry.kernels import linear_heuristics as h
from liger_registry.portable.spaces._linear import (
    VOCAB_SLABS,
    row_stages,
    vocab_bytes,
    vocab_heuristic,
    vocab_stages,
)

if TYPE_CHECKING:
    from liger_registry import Config, Problem

OP = "linear_sequence_loss"
_LAUNCH = "liger_registry.portable.linear_sequence_loss:"


def _rows(problem: Problem, config: Config) -> int:
    """The rows of a slab; where groups are large that of a group."""
    return min(max(int(config.slab_rows), int(problem.group)), max(int(problem.tokens), 1))


IMPLEMENTATIONS = (
    Implementation(
        op=OP,
        scheme="grad_in_forward",
        phase="forward",
        name="group_slabs",
        launch=_LAUNCH + "forward_group_slabs",
        space=ConfigSpace(slab_rows=list(h.SLAB_ROWS), sums=list(g.SUMS))
        .where(g.distinct, "a smaller slab holds all rows too")
        .where(h.few_roundings, "the head's gradient would be rounded more often than the call allows"),
        heuristic=g.heuristic,
        extra_bytes=g.slab_bytes,
        stages=row_stages(_rows, "forward", "backward"),
        doc="slabs of whole groups, whose logits are computed once: three products",
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
        stages=vocab_stages("forward", "backward"),
        doc="slabs of the vocabulary, twice: groups of any size, for four products instead of three",
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
)
