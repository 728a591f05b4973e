"""``softmax`` in PyTorch: what each implementation can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation
from liger_registry.kernels.costs import no_extra_bytes

if TYPE_CHECKING:
    from liger_registry import Config, Problem


def _eager_bytes(problem: Problem, config: Config) -> int:
    # Forward holds x in fp32 and the exponentials; backward y and a product, then the difference.
    return 2 * int(problem.rows) * int(problem.width) * (8 if problem.dtypes["x"] == "float64" else 4)


IMPLEMENTATIONS = tuple(
    Implementation(
        op="softmax",
        phase=phase,
        name=name,
        launch=f"liger_registry.portable.softmax:{phase}_{name}",
        extra_bytes=_eager_bytes if name == "eager" else no_extra_bytes,
        doc=doc,
    )
    for phase in ("forward", "backward")
    for name, doc in (("eager", "the formula in PyTorch operations"), ("functional", "torch's own kernel"))
)
