"""``logit_statistics`` in PyTorch: what each implementation can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Problem


def _bytes(problem: Problem, config: Config) -> int:
    # The logits in the statistics' dtype, the exponentials, and one more product or mask.
    return 3 * int(problem.rows) * int(problem.vocab) * (8 if problem.dtypes["logits"] == "float64" else 4)


IMPLEMENTATIONS = tuple(
    Implementation(
        op="logit_statistics",
        phase=phase,
        name="eager",
        launch=f"liger_registry.portable.logit_statistics:{phase}_eager",
        extra_bytes=_bytes,
        doc="the formula in PyTorch operations",
    )
    for phase in ("forward", "backward")
)
