"""Loading the kernels of decisions ahead of the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from liger_registry.decision import Decision
from liger_registry.tuning.arguments import Arguments

if TYPE_CHECKING:
    import torch

    from liger_registry.catalog import Catalog
    from liger_registry.device import Device


def preload(catalog: Catalog, decisions: Iterable[Decision], device: Device) -> int:
    """Run every decision once on inputs of few rows, which loads its binaries and prepares its launches.

    Row counts are not specialised on, so the kernels loaded are those of the real problems; a launch that training
    makes with other alignment is compiled when it comes.

    Args:
        catalog: holds the contracts.
        decisions: what to load.
        device: the present device they are for.

    Returns:
        How many were loaded; on a device without kernels to load it is 0.
    """
    import torch

    if device.vendor not in ("cuda", "rocm"):
        return 0
    place = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    count = 0
    for decision in decisions:
        _run(catalog, decision, device, place)
        count += 1
    torch.cuda.synchronize(place)
    return count


def _run(catalog: Catalog, decision: Decision, device: Device, place: torch.device) -> None:
    import torch

    problem = decision.problem
    op = catalog.op(problem.op)
    small = problem.having(**min(op.proxies(problem), key=lambda dims: sum(dims.values())))
    needs, options = op.needs_of(problem), op.options_of(small)
    launch = decision.implementation.bind(decision.config, device, options, needs, small)
    with torch.no_grad():
        launch(*Arguments.of(op, small, place).tensors)
