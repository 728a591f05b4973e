"""``logit_divergence`` in PyTorch: what it can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Problem


def _bytes(problem: Problem, config: Config) -> int:
    # Both log-probabilities, and what a mixture's terms take at their peak.
    return 9 * int(problem.rows) * int(problem.vocab) * (8 if "float64" in problem.dtypes.values() else 4)


IMPLEMENTATIONS = (
    Implementation(
        op="logit_divergence",
        phase="forward",
        name="eager",
        launch="liger_registry.portable.logit_divergence:forward_eager",
        extra_bytes=_bytes,
        doc="the formula in PyTorch operations",
    ),
)
