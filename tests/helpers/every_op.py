"""Small calls of every public operation, made from what its contract lists; for faults that any of them may have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from liger_registry import registry
from liger_registry.problem import BACKWARD
from liger_registry.tuning.odd import problems_for


@dataclass(frozen=True)
class Call:
    """One call: an operation, its inputs and its options."""

    op: object
    problem: object
    text: str

    def __str__(self):
        return f"{self.op.name}-{self.text}"

    @property
    def options(self):
        return self.op.options_of(self.problem)

    def inputs(self, device="cpu", seed=0, needs=True):
        """Fresh leaves; differentiable ones that the problem needs a gradient of require one."""
        needed = dict(zip(self.op.differentiable, self.op.needs(self.problem), strict=True))
        found = self.op.example(self.problem, device, seed, "random")
        return tuple(
            t if t is None or not (needs and needed.get(spec.name)) else t.detach().requires_grad_()
            for spec, t in zip(self.op.inputs, found, strict=True)
        )

    def run(self, inputs, **changes):
        """The outputs as a tuple."""
        found = registry.get(self.op.name)(*inputs, **{**self.options, **changes})
        return found if isinstance(found, tuple) else (found,)

    def right(self, inputs, **changes):
        """The outputs of the contract's reference as a tuple."""
        found = self.op.reference(*inputs, **{**self.options, **changes})
        return found if isinstance(found, tuple) else (found,)

    def differentiable_outputs(self, outputs):
        names = self.op.outputs_of(self.options)
        return [y for name, y in zip(names, outputs, strict=True) if name not in self.op.constant and y.requires_grad]


def public_ops():
    return [op for op in registry.catalog.ops() if not op.private]


def calls(dtype="float32", every=False):
    """For each operation its middling call; with ``every`` also one for each combination of flags it lists."""
    found = []
    for op in public_ops():
        seen = set()
        for problem in problems_for(op, op.schemes[-1].name, BACKWARD):
            if set(problem.dtypes.values()) - {dtype, "none"} or min(problem.dims.values()) < 1:
                continue
            if op.odd is None and set(problem.dims.values()) != {5, 41}:
                continue
            if any(not need and problem.dtypes.get(n, dtype) != "none" for n, need in _needs(op, problem)):
                continue
            flags = (problem.flags.without("needs", "budget"), problem.dtypes)
            if flags in seen or (seen and not every):
                continue
            seen.add(flags)
            text = "-".join(filter(None, (problem.dims.text, problem.dtypes.text, flags[0].text)))
            found.append(Call(op, replace(problem, dims=problem.dims), text))
    return found


def _needs(op, problem):
    return zip(op.differentiable, op.needs(problem), strict=True)


def gradients(call, outputs, inputs, retain=False, seed=9):
    """The gradients of a weighted sum of the outputs with respect to the inputs that require one."""
    roots = call.differentiable_outputs(outputs)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.rand(y.shape, generator=generator).to(y.dtype).to(y.device) + 0.5 for y in roots]
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    return torch.autograd.grad(roots, leaves, weights, retain_graph=retain, allow_unused=True)
