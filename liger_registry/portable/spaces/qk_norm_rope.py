"""``qk_norm_rope`` in PyTorch: what each implementation can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Problem


def _bytes(problem: Problem, config: Config) -> int:
    """Heads of the wider of queries and keys in the statistics' dtype: x, its squares or the gradient, two more."""
    heads = max(int(problem.heads_q), int(problem.heads_k))
    width = 8 if problem.dtypes["q"] == "float64" else 4
    return 5 * int(problem.tokens) * heads * int(problem.head_dim) * width


IMPLEMENTATIONS = tuple(
    Implementation(
        op="qk_norm_rope",
        phase=phase,
        name=name,
        launch=f"liger_registry.portable.qk_norm_rope:{phase}_{name}",
        extra_bytes=_bytes,
        doc=doc,
    )
    for phase, name, doc in (
        ("forward", "eager", "the models' formula in PyTorch operations"),
        ("forward", "functional", "torch's own fused norm, then the rotation"),
        ("backward", "eager", "the derivative in the statistics' dtype, rounded once"),
    )
)
