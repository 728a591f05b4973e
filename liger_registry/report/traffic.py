"""The bytes that a problem has to move at least: the bound that a time is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry.problem import BACKWARD, SCHEME, Problem
from liger_registry.tuning.arguments import META, Arguments

if TYPE_CHECKING:
    import torch

    from liger_registry.catalog import Catalog
    from liger_registry.op import Op

#: Bytes a second that a copy reaches, read and written together, by SKU; benchmarks/NOTES.md says how it was measured.
COPY_RATES = {"h200": 4.27e12}


def least_bytes(catalog: Catalog, op: Op, problem: Problem) -> int | None:
    """The bytes of a problem's tensors, each read or written once.

    None where that is no bound worth naming: for a scheme, and for operations with matrix products inside, whose time
    is arithmetic.
    """
    composite = any(i.stages is not None for i in catalog.implementations(op.name))
    if problem.phase == SCHEME or composite:
        return None
    arguments = Arguments.of(op, problem, META)
    if problem.phase == BACKWARD:
        needs = dict(zip(op.differentiable, op.needs(problem), strict=True))
        pairs = zip((i.name for i in op.inputs), arguments.inputs, strict=True)
        written = [tensor for name, tensor in pairs if needs.get(name)]
    else:
        scheme = op.scheme(problem.scheme)
        told = {"needs": op.needs(problem)} if scheme.gradients else {}
        written = list(scheme.allocate(*arguments.inputs, **op.options_of(problem), **told))
    return sum(map(_size, (*arguments.tensors, *written)))


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
