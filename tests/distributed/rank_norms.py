"""What ranks run of norms over DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from liger_registry import registry
from liger_registry.errors import RegistryError

LAYOUTS: dict[str, Any] = {
    "replicated": [Replicate()],
    "tokens": [Shard(1)],
    "rows": [Shard(0)],
    "hidden": [Shard(2)],
    "hidden, from behind": [Shard(-1)],
}
INPUTS = {
    "rms_norm": ("x", "weight"),
    "layer_norm": ("x", "weight", "bias"),
    "fused_add_rms_norm": ("x", "x", "weight"),
    "swiglu": ("x", "x"),
}


def norm(rank: int, world: int, op: str, layout: str) -> dict[str, Any]:
    """An operation over DTensors against the same over whole tensors: outputs and gradients, and how they lie."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    # Seven tokens: the ranks' parts differ.
    whole = [torch.randn((4, 7, 24) if kind == "x" else (24,)) for kind in INPUTS[op]]
    upstream = torch.randn(4, 7, 24)
    spread = [
        distribute_tensor(t, mesh, LAYOUTS[layout] if t.dim() == 3 else [Replicate()]).requires_grad_() for t in whole
    ]
    whole = [t.requires_grad_() for t in whole]
    function = registry.get(op)
    outputs = []
    for tensors, given in ((spread, distribute_tensor(upstream, mesh, [Replicate()])), (whole, upstream)):
        result = function(*tensors)
        result = result if isinstance(result, tuple) else (result,)
        sum((y * given * (n + 1)).sum() for n, y in enumerate(result)).backward()
        outputs.append([*result, *[t.grad for t in tensors]])
    ours = [t.full_tensor() for t in outputs[0]]
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, outputs[1], strict=True))
    return {"off": off, "placements": str(outputs[0][0].placements), "weight": str(outputs[0][-1].placements)}


def sum_of_parts(rank: int, world: int) -> float:
    """A tensor of which each rank holds a part of a sum."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    x, weight = torch.randn(4, 24), torch.randn(24)
    part = DTensor.from_local(x / world, mesh, [Partial()], run_check=False)
    y = registry.get("rms_norm")(part, distribute_tensor(weight, mesh, [Replicate()]))
    return float((y.full_tensor() - registry.get("rms_norm")(x, weight)).abs().max())


def refused(rank: int, world: int) -> dict[str, str]:
    """What is an error by name."""
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.randn(4, 24), mesh, [Shard(0)])
    target = distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
    found = {}
    for name, call in {
        "plain": lambda: registry.get("rms_norm")(x, torch.randn(24)),
        "loss": lambda: registry.get("cross_entropy")(x, target),
    }.items():
        try:
            call()
        except RegistryError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def collectives(rank: int, world: int) -> dict[str, int]:
    """How many collectives calls on tokens of one's own take: none."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.randn(4, 8, 24), mesh, [Shard(1)]).requires_grad_()
    weight = distribute_tensor(torch.randn(24), mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as mode:
        registry.get("rms_norm")(x, weight).to_local().sum().backward()
    return {str(name): count for name, count in mode.get_comm_counts().items()}
