"""How long logits that were left out can still be computed: until the weights they would come from change.

A hook that PyTorch calls after each step of any optimizer counts the steps, and remembers the last optimizers. Logits
from before a step can be computed after it only if the head provably was no part of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from liger_registry.errors import LateReadError

_REMEMBERED = 16


class _Steps:
    """The steps of all optimizers of the process since the first head was bound."""

    def __init__(self) -> None:
        self.count = 0
        # The last steps: what their number was, autograd's sequence number at that time, and the optimizer.
        self.last: deque[tuple[int, int, weakref.ref[torch.optim.Optimizer]]] = deque(maxlen=_REMEMBERED)
        self._watching = False
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Register the hook, once a process."""
        with self._lock:
            if not self._watching:
                from torch.optim.optimizer import register_optimizer_step_post_hook

                register_optimizer_step_post_hook(self._stepped)
                self._watching = True

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if torch.compiler.is_dynamo_compiling():
            return  # a step that is traced changes nothing yet; run, it raises the parameters' versions
        self.count += 1
        self.last.append((self.count, _sequence_number(), weakref.ref(optimizer)))

    def since(self, count: int) -> list[torch.optim.Optimizer] | None:
        """The optimizers that stepped after this count, or None if they are not all known any more."""
        if self.count - count > len(self.last):
            return None
        found = [reference() for number, _, reference in self.last if number > count]
        return None if None in found else found  # type: ignore[return-value]

    def count_at(self, sequence: int) -> int:
        """The number of steps there had been when autograd's sequence number was this one."""
        later = sum(1 for _, at, _ in self.last if at > sequence)
        return 0 if later == self.last.maxlen else self.count - later


def _sequence_number() -> int:
    """Autograd's sequence number of this thread, which every recorded operation raises."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.zeros((), requires_grad=True, device="cpu").view(()).grad_fn
    assert node is not None
    return node._sequence_nr()


STEPS = _Steps()


class Stamp:
    """The moment of a call: the steps there had been, and the versions of the tensors that it read.

    Args:
        module: the head.
        hidden: what it was called with.
        count: how many steps there had been; None for now.
    """

    __slots__ = ("count", "hidden_version", "version", "weight")

    def __init__(self, module: nn.Module, hidden: Tensor, count: int | None = None) -> None:
        STEPS.watch()
        self.count = STEPS.count if count is None else count
        weight = module._parameters.get("weight")
        # Only a plain parameter says by its version whether it changed: gathered and offloaded ones come and go.
        plain = type(weight) is nn.Parameter and not hasattr(weight, "ds_id")
        self.weight = weakref.ref(weight) if plain else None
        self.version = _version(weight) if count is None and plain else None
        self.hidden_version = _version(hidden)

    def check(self, module: nn.Module, hidden: Tensor, name: str) -> None:
        """Raise if the logits of that call are no longer what can be computed now.

        Raises:
            LateReadError: the weights have changed since, or may have; or the hidden states have.
        """
        if _version(hidden) != self.hidden_version:
            raise LateReadError(
                f"the logits of {name} cannot be computed any more",
                why="the hidden states they come from were written to since the forward pass",
                fix="read the logits before, or leave the hidden states as they are",
            )
        weight = module._parameters.get("weight")
        same = self.weight is not None and self.weight() is weight
        changed = same and self.version is not None and _version(weight) != self.version
        if not changed and (self.count == STEPS.count or (same and self._untouched(module))):
            return
        raise LateReadError(
            f"the logits of {name} are read too late",
            why="they were left out of the forward pass, and the weights they would be computed from have changed "
            "since: an optimizer stepped, or they were written to",
            fix="read them before optimizer.step(): outputs.logits.computed() keeps them as a plain tensor",
        )

    def _untouched(self, module: nn.Module) -> bool:
        """Whether no optimizer that stepped since holds a parameter of the head."""
        optimizers = STEPS.since(self.count)
        if optimizers is None:
            return False
        own = {id(p) for p in module.parameters()}
        return not any(id(p) in own for o in optimizers for group in o.param_groups for p in group["params"])


def _version(tensor: Tensor | None) -> int:
    if tensor is None or tensor.is_inference():
        return -1  # these count none
    return tensor._version


def traced_stamp(module: nn.Module, hidden: Tensor) -> Stamp:
    """The moment at which a compiled forward returned these hidden states, from the node that made them."""
    if hidden.grad_fn is None:
        return Stamp(module, hidden, -1 if STEPS.count else 0)  # any step may have been later
    return Stamp(module, hidden, STEPS.count_at(hidden.grad_fn._sequence_nr()))
