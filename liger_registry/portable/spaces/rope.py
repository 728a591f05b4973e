"""``rope`` in PyTorch: what each implementation can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Problem

_WIDTH = {"float64": 8, "float32": 4}


def _turned(problem: Problem) -> int:
    """Bytes of one product of the wider of queries and keys."""
    width = max(_WIDTH.get(str(dtype), 2) for dtype in problem.dtypes.values())
    width = max(width, 4) if problem.wide else width
    heads = max(int(problem.heads_q), int(problem.heads_k))
    return int(problem.tokens) * heads * int(problem.head_dim) * width


def _eager_bytes(problem: Problem, config: Config) -> int:
    return 4 * _turned(problem)  # both products, the pairs swapped, and the result before it is laid out


def _halves_bytes(problem: Problem, config: Config) -> int:
    return 2 * _turned(problem)  # of half the columns: two products, and two wide copies


IMPLEMENTATIONS = tuple(
    Implementation(
        op="rope",
        phase=phase,
        name=name,
        launch=f"liger_registry.portable.rope:{phase}_{name}",
        extra_bytes=extra_bytes,
        doc=doc,
    )
    for phase in ("forward", "backward")
    for name, extra_bytes, doc in (
        ("eager", _eager_bytes, "the models' formula in PyTorch operations"),
        ("halves", _halves_bytes, "each column of the pairs written into the result"),
    )
)
