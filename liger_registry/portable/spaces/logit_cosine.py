"""``logit_cosine`` in PyTorch: what it can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation
from liger_registry.kernels.logit_cosine_heuristics import COPIES, rows_at_once

if TYPE_CHECKING:
    from liger_registry import Config, Problem


def _bytes(problem: Problem, config: Config) -> int:
    rows = min(int(problem.rows), rows_at_once(int(problem.vocab)))
    return COPIES * rows * int(problem.vocab) * (8 if "float64" in problem.dtypes.values() else 4)


IMPLEMENTATIONS = (
    Implementation(
        op="logit_cosine",
        phase="forward",
        name="eager",
        launch="liger_registry.portable.logit_cosine:forward_eager",
        extra_bytes=_bytes,
        doc="the formula in PyTorch operations, some rows at a time",
    ),
)
