"""Heads under tensor parallelism: a weight whose classes are spread over ranks, and whoever gathers the logits.

PyTorch's ``ColwiseParallel`` gives the head hidden states as a DTensor and takes its output by hooks; transformers puts
a forward of its own around the module's. Deferred logits of such a head stand for the gathered ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]
_WRAPPER = "TensorParallelLayer.install_forward.<locals>.tp_forward"


@dataclass(frozen=True)
class Spread:
    """This rank's part of a weight.

    Attributes:
        mesh: the ranks, in one dimension.
        start: the index of its first class.
        size: how many it has.
    """

    mesh: Any
    start: int
    size: int

    @property
    def group(self) -> Any:  # noqa: ANN401
        """The process group of the ranks."""
        return self.mesh.get_group()


def spread_of(weight: object) -> Spread | None:
    """How a weight is spread by its classes over a mesh of one dimension; None if it is not."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
        return None
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return Spread(weight.device_mesh, int(offset[0]) if shape[0] else 0, int(shape[0]))


def local(tensor: Any) -> Any:  # noqa: ANN401 - a DTensor, or None
    """This rank's part of a parameter, with its graph."""
    return None if tensor is None else tensor.to_local()


def rows_of(hidden: object, spread: Spread, wrapped: bool) -> Tensor | None:
    """The hidden states of a call, which all ranks have alike; None if they have not.

    A plain tensor is so only where transformers' own forward is around the module's: elsewhere each rank would have its
    own, and the parameter would be FSDP's.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(hidden, DTensor):
        same = hidden.device_mesh == spread.mesh and hidden.placements == (Replicate(),)
        return hidden.to_local() if same else None
    return hidden if wrapped and isinstance(hidden, Tensor) else None


def gathering_forward(head: nn.Module) -> Forward | None:
    """The forward that transformers' tensor parallelism put on a head and that gathers its logits; None without one."""
    forward = head.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or forward.__qualname__ != _WRAPPER:
        return None
    cells = (cell.cell_contents for cell in forward.__closure__ or ())
    around = dict(zip(forward.__code__.co_freevars, cells, strict=True))
    style, inner = around.get("self"), around.get("original_forward")
    layout = getattr(style, "output_layouts", None)
    gathers = getattr(layout, "is_replicate", lambda: False)() and getattr(style, "use_local_output", False)
    own = getattr(inner, "__func__", None) is nn.Linear.forward
    return forward if gathers and own else None


def shards_of_logits(call: Any, placements: Sequence[Any] | None) -> Any:  # noqa: ANN401 - HeadCall; a DTensor
    """The logits of a call spread by their classes, as its hooks wanted them after all: nothing is gathered."""
    from torch.distributed.tensor import DTensor, Shard

    from liger_registry.transformers.engine.headcall import place
    from liger_registry.transformers.vocabulary_parallel import SumOfGradients

    spread: Spread = call.spread
    call.counts[place()] += 1
    rows = SumOfGradients.apply(call.hidden, spread.group)  # type: ignore[no-untyped-call]
    weight, bias = local(call.module.weight), local(call.module.bias)
    logits = torch.nn.functional.linear(rows, weight, bias)
    shape = torch.Size((*logits.shape[:-1], call.vocab))
    made = DTensor.from_local(
        logits,
        spread.mesh,
        [Shard(logits.dim() - 1)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made if placements is None else made.redistribute(placements=placements)
