"""Calls with DTensors: norms and activations on each rank's own rows.

What works row by row is run on the local tensors, through the same eager face, and its results are put together again.
A tensor that is spread along the rows' own dimension, or holds but a part of a sum, is gathered first, as PyTorch does
for its own norms. Weights are the same on all ranks; where rows are spread their gradient is a part of a sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from liger_registry.errors import InvalidInputError, UnsupportedShardingError

# Operations that need the whole of the last dimension, and those that need nothing of a neighbour.
ROWS = frozenset({"rms_norm", "layer_norm", "fused_add_rms_norm", "softmax"})
ELEMENTS = frozenset({"swiglu", "geglu", "relu_squared"})
Tensors = tuple[torch.Tensor | None, ...]


def any_spread(tensors: Sequence[object]) -> bool:
    """Whether one of them is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def all_spread(tensors: Sequence[object]) -> bool:
    """Whether all of them are DTensors."""
    return any_spread(tensors) and all(any_spread((tensor,)) for tensor in tensors)


def call_on_shards(name: str, function: Callable[..., Any], tensors: Tensors, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a DTensor, or a tuple of them
    """An operation's outputs, as DTensors spread like its first input.

    Args:
        name: the operation.
        function: calls it with local tensors.
        tensors: its inputs, DTensors of one mesh; those of one dimension are its weights.
        options: its options.

    Raises:
        InvalidInputError: plain tensors beside DTensors, or several meshes.
        UnsupportedShardingError: the operation does not work row by row.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if name not in ROWS | ELEMENTS:
        raise UnsupportedShardingError(
            f"{name} takes no DTensors",
            why="its result for a row depends on what other ranks hold",
            candidates=sorted(ROWS | ELEMENTS),
            fix="pass local tensors, x.to_local(); for a head that is spread by its classes there is "
            "liger_registry.transformers.vocabulary_parallel_cross_entropy",
        )
    given = [t for t in tensors if t is not None]
    if not all(isinstance(t, DTensor) for t in given):
        raise InvalidInputError(
            f"{name} got plain tensors beside DTensors",
            why="how the ranks share the gradient of a plain tensor is not known",
            fix="make it a DTensor too: distribute_tensor(weight, mesh, [Replicate()])",
        )
    first: Any = given[0]
    mesh, last = first.device_mesh, first.dim() - 1
    if any(t.device_mesh != mesh for t in given):  # type: ignore[attr-defined]
        raise InvalidInputError(f"the DTensors of {name} are on different meshes", fix="redistribute them to one")

    def kept(placement: Any) -> Any:  # noqa: ANN401
        rows = type(placement) is Shard and (placement.dim % first.dim() != last or name in ELEMENTS)
        return placement if rows else Replicate()

    layout = [kept(placement) for placement in first.placements]
    part = [Replicate() if placement.is_replicate() else Partial() for placement in layout]

    def local(tensor: Any) -> Any:  # noqa: ANN401 - a DTensor, or None
        if tensor is None:
            return None
        if tensor.dim() == 1 < first.dim() or (tensor.dim() == 1 and tensor is not first):
            whole = tensor.redistribute(placements=[Replicate()] * mesh.ndim)
            return whole.to_local(grad_placements=part)
        return tensor.redistribute(placements=layout).to_local()

    result = function(*(local(t) for t in tensors), **options)

    def joined(output: torch.Tensor) -> Any:  # noqa: ANN401
        strides = torch.empty(first.shape, device="meta").stride()
        return DTensor.from_local(output, mesh, layout, run_check=False, shape=first.shape, stride=strides)

    return tuple(joined(output) for output in result) if isinstance(result, tuple) else joined(result)
