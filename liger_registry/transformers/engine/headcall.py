"""One call of a bound head: what its logits would be computed from, and computing them after all."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from liger_registry.errors import AdapterError, LateReadError
from liger_registry.transformers.engine.folding import fold, repeat_elementwise
from liger_registry.transformers.engine.late import Stamp
from liger_registry.transformers.engine.recording import Node
from liger_registry.transformers.engine.requests import Request, ask
from liger_registry.transformers.engine.spread import Spread, spread_of

# Fewer rows than this share of all are computed alone: the last token of a prompt, a chunk of an entropy. All parts
# together may come to so many times the whole, which chunk after chunk would not need; after that it is computed.
_PART, _TIMES = 0.5, 2.0
_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """A function that Dynamo runs and does not trace, for code that a compiled function's own code calls.

    ``torch.compiler.disable`` on first use, and only where there is a Dynamo: to import it takes seconds, and Triton.
    """
    made: list[_Function] = []

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not made:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            made.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return made[0](*args, **kwargs)

    return called  # type: ignore[return-value]


class HeadCall:
    """What a call of a head was given, and its logits once they are computed.

    Args:
        module: the head, a linear layer.
        name: its path in the model.
        counts: how often logits were computed, by the place that asked; shared with the report.
        hidden: (..., hidden), after hooks, with its graph.
        dtype: of the logits: that of hidden, or of autocast.
        vocab: the number of classes.
        stamp: the moment; None for now.
    """

    def __init__(
        self,
        module: nn.Linear,
        name: str,
        counts: Counter[str],
        hidden: Tensor,
        dtype: torch.dtype,
        vocab: int,
        stamp: Stamp | None = None,
    ) -> None:
        self.module, self.name, self.counts = module, name, counts
        self.hidden, self.dtype, self.vocab = hidden, dtype, vocab
        self.stamp = stamp or Stamp(module, hidden)
        #: What is called for its weights to be there.
        self.outer: nn.Module = module
        #: How its weight is spread by classes over ranks; None if it is not.
        self.spread: Spread | None = None
        #: Weight and bias of the call, where they are no parameters of the module: views of a flat one, or sums that
        #: an adapter puts there while its own forward runs.
        self.derived: tuple[Tensor, Tensor | None] | None = None
        self.nodes: list[weakref.ref[Node]] = []
        #: Somebody wrote into the logits: there is nothing left to record.
        self.solid = False
        #: Somebody waits for the gradient of the logits themselves.
        self.watched = False
        #: A loss was computed without them.
        self.used = False
        self._logits: Tensor | None = None
        self._parts = 0
        #: The part that was computed last, and the node it is for: chunks one after the other take the memory of one.
        self._last: tuple[weakref.ref[Node], Tensor] | None = None
        # Values may be asked for below autograd or autocast, where calls are not what they are for a user.
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    @property
    def meta(self) -> Tensor:
        """The logits on the meta device."""
        return torch.empty((*self.hidden.shape[:-1], self.vocab), dtype=self.dtype, device="meta")

    @untraced
    def value(self, node: Node) -> Tensor:
        """What a node stands for, computed on first use.

        Raises:
            LateReadError: the weights have changed since the call.
        """
        if node.value is not None:
            return node.value
        if self._last is not None and self._last[0]() is node:
            return self._last[1]
        part = self._part(node)
        if part is not None:
            self._last = weakref.ref(node), part
            return part
        node.value = self._repeated(node)
        return node.value

    def _repeated(self, node: Node) -> Tensor:
        if node.value is not None:
            return node.value
        return self.logits() if node.parent is None else node.repeat(self._repeated(node.parent))

    def solidify(self) -> None:
        """Compute all that is recorded, views of one another in one memory, because that may be written to."""
        if self.solid:
            return
        done: dict[int, Tensor] = {}

        def compute(node: Node) -> Tensor:
            found = done.get(id(node))
            if found is None:
                found = self.logits() if node.parent is None else node.repeat(compute(node.parent))
                done[id(node)] = node.value = found
            return found

        for reference in self.nodes:
            if (node := reference()) is not None:
                compute(node)
        self.solid = True

    def logits(self) -> Tensor:
        """The head's own output, whole."""
        if self._logits is None:
            self._logits = self.compute(self.hidden)
        return self._logits

    def compute(self, rows: Tensor) -> Tensor:
        """The logits of some rows of hidden states, through the head's own call; without a gradient."""
        self.stamp.check(self.module, self.hidden, self.name)
        self.counts[place()] += 1
        request = _Values(self, rows.detach())
        self.ask_undisturbed(request, request.rows)
        if request.value is None:
            raise AdapterError(
                f"the logits of {self.name} cannot be computed",
                why="the call of the head no longer reaches the forward that was bound to it",
                fix="revert() the application before the head is replaced, and apply again after it",
            )
        return request.value

    def ask_undisturbed(self, request: Request, rows: Tensor) -> None:
        """Have a request answered without gradients, autocast, or what PyTorch is in the middle of."""
        include, exclude = self._keys
        with (
            torch._C._ForceDispatchKeyGuard(include, exclude),
            torch.no_grad(),
            torch.autocast(self.hidden.device.type, enabled=False),
        ):
            if self.derived is None and not is_sharded(self.module):
                ask(self.module, rows, request, self.outer)
            else:
                # Gathering the parts that are on other ranks disturbs nobody, whatever FSDP is in the middle of.
                request.answer(self.module, rows)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as they are now.

        Raises:
            LateReadError: they are gone.
        """
        weight, bias = self.derived or (self.module.weight, self.module.bias)
        here = hasattr(weight, "full_tensor") or weight.untyped_storage().nbytes() > 0
        if here and tuple(weight.shape) == (self.vocab, self.hidden.shape[-1]):
            return weight, bias
        raise LateReadError(
            f"the logits of {self.name} are read too late",
            why="the weights they would be computed from were gathered for the forward pass, and have been freed",
            fix="read them inside of the model's forward, or revert() the application to this model",
        )

    def _part(self, node: Node) -> Tensor | None:
        """The value from some rows alone, if they are few and the weights are here for the taking."""
        if self._logits is not None or not self._local:
            return None
        folded = fold(node, self.hidden.detach(), self.dtype)
        if folded is None:
            return None
        rows, whole = folded.rows.numel(), self.hidden.numel()
        if not rows or rows > whole * _PART or self._parts + rows > whole * _TIMES:
            return None
        self._parts += rows
        part = repeat_elementwise(node, self.compute(folded.rows.movedim(folded.classes, -1)))
        return part.movedim(-1, folded.classes)

    @property
    def _local(self) -> bool:
        """Whether a call of the head concerns this process alone, so that ranks may make different numbers of them."""
        module = self.module
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        plain = type(module._parameters.get("weight")) is nn.Parameter and self.outer is module
        return plain and not any(hooks)


class _Values:
    """Asks a head for logits."""

    def __init__(self, call: HeadCall, rows: Tensor) -> None:
        self.call, self.rows = call, rows
        self.answered = False
        self.value: Tensor | None = None

    def answer(self, module: nn.Linear, given: Tensor) -> Tensor:
        """The logits of the rows that were asked for: what hooks make of them they made in the first call already."""
        call = self.call
        with torch.no_grad(), torch.autocast(self.rows.device.type, enabled=False):
            weight, bias = (None if t is None else whole(t).to(call.dtype) for t in call.operands())
            assert weight is not None
            self.value = torch.nn.functional.linear(self.rows.to(call.dtype), weight, bias)
        self.answered = True
        return self.value


def whole(tensor: Tensor) -> Tensor:
    """A parameter, gathered if this rank has a part of it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def is_sharded(module: nn.Linear) -> bool:
    """Whether this rank has but a part of a head's weight at present."""
    return hasattr(module.weight, "full_tensor")


def can_be_called(call: HeadCall) -> bool:
    """Whether a call of a head has all of its weight: it is here, or FSDP gathers it for this module by itself."""
    module = call.module
    if call.derived is not None or call.outer is not module:
        return True
    if call.spread is not None and spread_of(module.weight) is not None:
        return True
    if not is_sharded(module):
        return module.weight.shape[0] == call.vocab or bool(module._forward_pre_hooks)  # which gather it
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return False
    # Modules that are gathered together are so while the model runs that they are part of.
    alone = len(getattr(state(), "_modules", ())) == 1
    return alone or getattr(getattr(state(), "_state_ctx", None), "iter_forward_root", None) is not None


def place() -> str:
    """The line of code that asked, outside of PyTorch and of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OUTSIDE) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"  # its own threads have no lines of the user's
