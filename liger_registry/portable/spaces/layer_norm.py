"""``layer_norm`` in PyTorch: what each implementation can do, and which configs it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Problem

_WIDTH = {"float64": 8}


def _eager_bytes(problem: Problem, config: Config) -> int:
    """Four buffers of the statistics' dtype."""
    return 4 * int(problem.rows) * int(problem.hidden) * _WIDTH.get(str(problem.dtypes["x"]), 4)


def _functional_bytes(problem: Problem, config: Config) -> int:
    """What mixed dtypes cost on a GPU: wide copies of x and the gradient, and results before they are cast."""
    present = {d for d in problem.dtypes.values() if d != "none"}
    return _eager_bytes(problem, config) if len(present) > 1 else 0


IMPLEMENTATIONS = tuple(
    Implementation(
        op="layer_norm",
        phase=phase,
        name=name,
        launch=f"liger_registry.portable.layer_norm:{phase}_{name}",
        extra_bytes=extra_bytes,
        doc=doc,
    )
    for phase in ("forward", "backward")
    for name, extra_bytes, doc in (
        ("eager", _eager_bytes, "the formula in PyTorch operations"),
        ("functional", _functional_bytes, "torch's own fused kernel"),
    )
)
