"""The tensors of one problem at its own sizes, as measuring and compiling ahead need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from liger_registry.op import Op
from liger_registry.problem import BACKWARD, Problem
from liger_registry.tuning.cases import CONTIGUOUS, gradient
from liger_registry.tuning.layouts import place

if TYPE_CHECKING:
    Tensors = tuple[torch.Tensor | None, ...]

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The tensors of one problem.

    Attributes:
        inputs: the operation's inputs.
        grad_outputs: one for each output, None for an output without gradient; empty for a forward problem.
        saved: what backward gets from forward behind the inputs; empty for a forward problem.
        tensors: what a launch function is given.
    """

    inputs: Tensors
    grad_outputs: Tensors
    saved: Tensors
    tensors: Tensors

    @classmethod
    def of(cls, op: Op, problem: Problem, device: torch.device, layouts: tuple[str, str] = CONTIGUOUS) -> Arguments:
        """Those of a problem on a device; tensors without values, on the meta device, come in layouts."""
        meta = device.type == "meta"

        def put(tensor: torch.Tensor | None, layout: str) -> torch.Tensor | None:
            return place(tensor, layout)[0] if meta and tensor is not None else tensor

        inputs = tuple(put(x, layouts[0]) for x in op.example(problem, device, 0, "random"))
        if problem.phase != BACKWARD:
            return cls(inputs, (), (), inputs)
        scheme, options = op.scheme(problem.scheme), op.options_of(problem)
        told = {"needs": op.needs(problem)} if scheme.gradients else {}
        needed = scheme.saved or scheme.saved_outputs
        with torch.no_grad():
            results = (scheme.reference if needed and not meta else scheme.allocate)(*inputs, **options, **told)
            found = dict(zip((*op.outputs, *scheme.saved), results, strict=True))
            grads = tuple(
                put(y if meta else gradient(y.shape, y.dtype, device, 1 + n, "random"), layouts[1])
                if y is not None and y.is_floating_point() and name not in op.constant
                else None
                for n, (name, y) in enumerate((name, found[name]) for name in op.outputs)
            )
        there = dict(zip((i.name for i in op.inputs), inputs, strict=True))
        saved = tuple(put(found[name], CONTIGUOUS[0]) for name in (*scheme.saved_outputs, *scheme.saved))
        return cls(inputs, grads, saved, (*grads, *(there[name] for name in scheme.saved_inputs), *saved))

    def apart(self, op: Op, problem: Problem) -> Arguments:
        """The same with copies of those that backward may write: others need them as they are, the reference too."""
        scheme, options = op.scheme(problem.scheme), op.options_of(problem)
        written = {name for name, option in op.overwrites.items() if options[option]}
        if problem.phase != BACKWARD or not (written or scheme.owned):
            return self
        pairs = zip(op.inputs, self.inputs, strict=True)
        inputs = tuple(t.clone() if t is not None and spec.name in written else t for spec, t in pairs)
        kept = zip((*scheme.saved_outputs, *scheme.saved), self.saved, strict=True)
        saved = tuple(t.clone() if t is not None and name in scheme.owned else t for name, t in kept)
        there = dict(zip((i.name for i in op.inputs), inputs, strict=True))
        tensors = (*self.grad_outputs, *(there[name] for name in scheme.saved_inputs), *saved)
        return Arguments(inputs, self.grad_outputs, saved, tensors)
