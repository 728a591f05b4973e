"""``group_norm`` in PyTorch: what each implementation can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import ConfigSpace, Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Device, Problem


def _bytes(problem: Problem, config: Config) -> int:
    """x and its squares in the statistics' dtype in forward; in backward also dy and products with it."""
    width = 8 if problem.dtypes["x"] == "float64" else 4
    count = int(problem.batch) * int(problem.channels) * int(problem.spatial)
    return count * width * (2 if problem.phase == "forward" else 5)


def _short_enough(config: Config, problem: Problem, device: Device) -> bool:
    """Torch's backward sums a group in fp32 one after the other: 4,100 with a spike are 4.2e-6 off, 3.9e-6 may be."""
    group = int(problem.channels) // int(problem.groups) * int(problem.spatial)
    return problem.phase == "forward" or problem.dtypes["x"] != "float32" or group <= 1024


_FUNCTIONAL = ConfigSpace().where(_short_enough, "torch sums fp32 gradients of large groups less exactly than is asked")

IMPLEMENTATIONS = tuple(
    Implementation(
        op="group_norm",
        phase=phase,
        name=name,
        launch=f"liger_registry.portable.group_norm:{phase}_{name}",
        space=_FUNCTIONAL if name == "functional" else ConfigSpace(),
        extra_bytes=_bytes,
        doc=doc,
    )
    for phase in ("forward", "backward")
    for name, doc in (
        ("eager", "the formula in PyTorch operations"),
        ("functional", "torch's own kernel, with statistics in fp32"),
    )
)
