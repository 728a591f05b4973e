"""The last tier: an operation's contract as an implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from liger_registry.implementation import OWN_DISTRIBUTION, Capability, Implementation
from liger_registry.op import Op
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.recompute import gradients

if TYPE_CHECKING:
    from liger_registry.device import Device


def reference_implementation(op: Op, problem: Problem) -> Implementation:
    """The last tier: the contract's own plain PyTorch, its backward by recomputation under autograd."""
    scheme = op.scheme(problem.scheme)
    names, count = [i.name for i in op.inputs], len(op.outputs)
    if scheme.backward is None and not set(names) <= set(scheme.saved_inputs):
        raise LookupError(f"scheme {scheme.name!r} of {op.name} saves not all inputs and has no backward")

    def forward(*inputs: object, device: Device, **options: object) -> tuple[object, ...]:
        return scheme.reference(*inputs, **options)

    def backward(*tensors: object, device: Device, needs: tuple[bool, ...], **options: object) -> tuple[object, ...]:
        if scheme.backward is not None:
            return scheme.backward(*tensors, needs=needs, **options)
        held: Mapping[str, object] = dict(zip(scheme.saved_inputs, tensors[count:], strict=False))
        inputs = [held[name] for name in names]
        asked = dict(zip(op.differentiable, needs, strict=True))
        wanted = [asked.get(name, False) for name in names]
        present = op.outputs_of(options)
        grads = [g for name, g in zip(op.outputs, tensors[:count], strict=True) if name in present]
        found = gradients(lambda *xs: op.reference(*xs, **options), inputs, grads, wanted)  # type: ignore[arg-type]
        return tuple(g for name, g in zip(names, found, strict=True) if name in op.differentiable)

    launch = {FORWARD: forward, BACKWARD: backward}[problem.phase]
    return Implementation(
        op.name, problem.phase, "reference", launch, scheme.name, capability=Capability(), distribution=OWN_DISTRIBUTION
    )
