"""The eager face of an operation: one autograd node for any of them, its decisions carried in an entry.

The ``torch.library`` face is in ``library``, and what chooses between the two in ``handle``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from liger_registry.errors import UnsupportedTransformError
from liger_registry.guards import never
from liger_registry.launch import NotLoaded
from liger_registry.library import transform_error

Tensor = torch.Tensor
Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Special:
    """What a resolved call has that most operations do not have.

    Attributes:
        present: positions of the outputs that the call returns.
        constant: positions among those of outputs that no gradient flows through.
        saved_outputs: positions of the outputs that backward reads.
        owned: how many of the saved tensors, the last ones, the first backward may write and hand over.
        once: backward overwrites an input, so that there is no second one.
    """

    present: tuple[int, ...]
    constant: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    owned: int
    once: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that was resolved: what a hit of the memo needs.

    Attributes:
        forward: ``(*inputs)`` to outputs and saved tensors.
        fallback: the same in plain PyTorch, for a launch whose binary is not loaded while a stream is being captured.
        backward: ``(*grad_outputs, *saved_inputs, *saved_outputs, *saved)`` to gradients; None if nothing needs one.
        fallback_backward: the same in plain PyTorch.
        outputs: how many of forward's results are outputs.
        saved_inputs: positions of the inputs that backward reads.
        special: what the operation has beyond the plain case; None for the plain one.
        gradients: for each input the position of its gradient among backward's results; None if not differentiable.
        guard: ``(*inputs)`` to whether a call's tensors are like those that this one was resolved for.
    """

    forward: Callable[..., tuple[Any, ...]]
    fallback: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]] | None
    fallback_backward: Callable[..., tuple[Any, ...]] | None
    outputs: int
    saved_inputs: tuple[int, ...]
    gradients: tuple[int | None, ...]
    special: Special | None = None
    guard: Callable[..., bool] = never

    def run(self, *tensors: Tensor | None) -> Any:  # noqa: ANN401 - a tensor, or a tuple where there are several outputs
        """The outputs, without a graph."""
        results = self.run_forward(solid(tensors))
        if self.special is not None:
            results = tuple(results[i] for i in self.special.present)
            return results[0] if len(results) == 1 else results
        return results[0] if self.outputs == 1 else results[: self.outputs]

    def run_forward(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Outputs and saved tensors from the inputs."""
        try:
            return self.forward(*tensors)
        except NotLoaded:
            return self.fallback(*tensors)

    def run_backward(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """The gradients from ``(*grad_outputs, *saved_inputs, *saved_outputs, *saved)``."""
        assert self.backward is not None
        assert self.fallback_backward is not None
        try:
            return self.backward(*tensors)
        except NotLoaded:
            return self.fallback_backward(*tensors)


class Fused(torch.autograd.Function):
    """The eager face: one autograd node for any operation, its decisions carried in the entry."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *tensors: Tensor | None) -> Any:  # noqa: ANN401
        """Run the forward phase and save what its scheme says."""
        tensors = solid(tensors)
        results = entry.run_forward(tensors)
        count = entry.outputs
        if entry.special is not None:
            return _finish(ctx, entry, entry.special, tensors, results)
        ctx.save_for_backward(*[tensors[i] for i in entry.saved_inputs], *results[count:])
        ctx.entry = entry
        return results[0] if count == 1 else results[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401
        """Run the backward phase that was chosen before forward ran."""
        entry = ctx.entry
        grads = tuple(_materialized(grad) for grad in grads)
        if entry.special is not None:
            return _special_backward(ctx, entry, entry.special, grads)
        if torch.is_grad_enabled():  # create_graph: what runs inside must not record, and what comes out must not lie
            with torch.no_grad():
                found = entry.run_backward(*grads, *ctx.saved_tensors)
            found = once(found, (*grads, *ctx.saved_tensors))
        else:
            found = entry.run_backward(*grads, *ctx.saved_tensors)
        return (None, *[None if i is None else found[i] for i in entry.gradients])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ANN401
        """Forward-mode differentiation is refused by name."""
        raise transform_error("forward-mode differentiation (jvp)")


# torch.autograd.Function.apply is a Python function that looks for torch.func's transforms before it calls this one. A
# handle has looked already, as part of its key, and without the second look a small call takes 30 % less.
apply_fused: Callable[..., Any] = super(torch.autograd.Function, Fused).apply


def _finish(ctx: Any, entry: Entry, special: Special, tensors: Tensors, results: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Save what a special operation's backward reads, and give the outputs that the call asked for."""
    count = entry.outputs
    saved = results[count : len(results) - special.owned]
    kept = (*[tensors[i] for i in entry.saved_inputs], *[results[i] for i in special.saved_outputs], *saved)
    ctx.save_for_backward(*kept)
    ctx.entry = entry
    # Not among the saved tensors: whoever takes these may write them, and must be the only one to hold them.
    ctx.owned = list(results[len(results) - special.owned :]) if special.owned else None
    ctx.used = False
    outputs = tuple(results[i] for i in special.present)
    ctx.mark_non_differentiable(*[outputs[i] for i in special.constant])
    return outputs[0] if len(outputs) == 1 else outputs


def _special_backward(ctx: Any, entry: Entry, special: Special, given: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Backward of an operation that has optional or constant outputs, hands buffers over or overwrites an input."""
    grads: list[Tensor | None] = [None] * entry.outputs
    for number, position in enumerate(special.present):
        grads[position] = None if number in special.constant else given[number]
    saved = ctx.saved_tensors  # raises where the graph was freed
    if ctx.used and special.once:
        raise UnsupportedTransformError(
            "a second backward through an operation that worked in place",
            why="the first one has overwritten the input that the second would read",
            fix="leave in_place=True out where the graph is retained",
        )
    owned: Sequence[Tensor | None] = ()
    with torch.no_grad():
        if special.owned:
            owned, ctx.owned = ctx.owned, None
            if owned is None:  # handed over by the first backward, so made once more
                again: list[Tensor | None] = [None] * len(entry.gradients)
                for position, tensor in zip(entry.saved_inputs, saved, strict=False):
                    again[position] = tensor
                owned = entry.run_forward(again)[-special.owned :]
        ctx.used = True
        found = entry.run_backward(*grads, *saved, *owned)
    if torch.is_grad_enabled():
        found = once(found, (*[g for g in grads if g is not None], *[t for t in saved if t is not None]))
    return (None, *[None if i is None else found[i] for i in entry.gradients])


class _Once(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated: under ``create_graph`` a silent zero would be wrong."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ANN401
        return tuple(t.view_as(t) for t in tensors[:count] if t is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        raise transform_error("double backward")


def once(gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, connected to what they came from by a node that raises when it is differentiated."""
    given = [g for g in gradients if g is not None]
    linked = _Once.apply(len(given), *given, *sources)  # type: ignore[no-untyped-call]
    passed = iter(linked)
    return tuple(None if g is None else next(passed) for g in gradients)


def solid(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Inputs whose memory holds their values; the same tuple in all but contrived cases."""
    for tensor in tensors:
        if tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()):
            return tuple(None if t is None else t.resolve_neg().clone() for t in tensors)
    return tensors


def _materialized(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values: not a negated view, not a zero without memory, not one of a batch."""
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # is_grads_batched, jacobian(vectorize=True)
        raise transform_error("batched gradients (vmap over backward)")
    if tensor.is_neg() or tensor._is_zerotensor():
        return tensor.resolve_neg().clone()
    return tensor
