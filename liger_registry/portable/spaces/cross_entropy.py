"""``cross_entropy`` in PyTorch: what each implementation can do."""

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
        op="cross_entropy",
        phase=phase,
        name=name,
        launch=f"liger_registry.portable.cross_entropy:{phase}_{name}",
        extra_bytes=_bytes,
        doc=doc,
    )
    for phase in ("forward", "backward")
    for name, doc in (("eager", "the formula in PyTorch operations"), ("functional", "with torch's own reductions"))
)
