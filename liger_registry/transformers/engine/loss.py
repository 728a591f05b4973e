"""The losses of deferred logits: cross-entropy fused with the head, through the head module's own call.

What the hooks around that call see as its output are deferred logits again, not the loss. They are the way of the
loss's gradient, as a zero of their shape that takes no memory: so hooks and functions that gather the head's parameters
before its backward run in time, and those that keep or change logits find what they expect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from liger_registry.handle import PLAIN
from liger_registry.transformers._handles import call as call_op
from liger_registry.transformers.engine.deferred import Cell, DeferredLogits, HeadFunction, defer
from liger_registry.transformers.engine.folding import Folded, fold
from liger_registry.transformers.engine.headcall import HeadCall, can_be_called, whole
from liger_registry.transformers.engine.requests import ask
from liger_registry.transformers.engine.spread import local, spread_of


def cross_entropy(
    input: Any,  # noqa: ANN401 - the names of torch.nn.functional.cross_entropy
    target: Any,  # noqa: ANN401
    weight: Any = None,  # noqa: ANN401
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # noqa: ANN401
    """``torch.nn.functional.cross_entropy`` of deferred logits; NotImplemented where only the real ones will do."""
    if size_average is not None or reduce is not None:
        reduction = nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    if not isinstance(input, DeferredLogits):
        return NotImplemented
    call, folded = input.node.call, _folded(input)
    # Whatever is out of order is left to PyTorch, which says so in its own words.
    if (
        folded is None
        or folded.classes != (1 if input.dim() > 1 else 0)
        or not _plain(target, torch.int64, call)
        or target.shape != (*input.shape[: folded.classes], *input.shape[folded.classes + 1 :])
        or not (weight is None or (_plain(weight, input.dtype, call) and tuple(weight.shape) == (call.vocab,)))
        or reduction not in ("mean", "sum", "none")
        or not 0.0 <= label_smoothing <= 1.0
        or (label_smoothing and call.spread is not None)
        or not can_be_called(call)
    ):
        return NotImplemented
    graded = torch.is_grad_enabled() and input.requires_grad
    functions = _functions(input)
    if graded and (functions is None or call.watched):
        return NotImplemented
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    with torch.set_grad_enabled(graded):
        rows = folded.rows.movedim(folded.classes, -1)
        loss = FusedLoss(call, folded, rows, target, weight, options).compute(functions)
    if loss is None:
        return NotImplemented
    call.used = True
    return loss.to(_result_dtype(input))


def argmax(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:  # noqa: ANN401
    """``torch.argmax`` over the classes of deferred logits; NotImplemented where only the real ones will do."""
    if not isinstance(input, DeferredLogits) or dim is None or input.node.value is not None:
        return NotImplemented
    call, folded = input.node.call, _folded(input)
    # Roundings after the head's own would make classes equal that are not.
    if folded is None or not folded.exact or folded.classes != dim % input.dim() or not call.hidden.numel():
        return NotImplemented
    request = _Predictions(call, folded.rows.detach().movedim(folded.classes, -1))
    call.stamp.check(call.module, call.hidden, call.name)
    call.ask_undisturbed(request, request.rows)
    if request.found is None:
        return NotImplemented
    return request.found.unsqueeze(dim) if keepdim else request.found


def _folded(logits: DeferredLogits) -> Folded | None:
    node = logits.node
    return None if node.call.solid else fold(node, node.call.hidden, node.call.dtype)


def _plain(tensor: object, dtype: torch.dtype, call: HeadCall) -> bool:
    return type(tensor) in PLAIN and tensor.dtype == dtype and tensor.device == call.hidden.device  # type: ignore[attr-defined]


def _result_dtype(logits: DeferredLogits) -> torch.dtype:
    """The dtype of PyTorch's own loss: that of the logits, fp32 under autocast."""
    autocast = torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float64
    return torch.float32 if autocast else logits.dtype


class FusedLoss:
    """Asks a head for the cross-entropy of its logits.

    Args:
        call: the call the logits come from.
        folded: what was done to them.
        rows: the hidden states, (..., hidden), with their graph.
        target: (...), int64.
        class_weight: (vocab,), or None.
        options: of the operation.
    """

    def __init__(
        self,
        call: HeadCall,
        folded: Folded,
        rows: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        self.call, self.folded, self.rows = call, folded, rows
        self.target, self.class_weight, self.options = target, class_weight, options
        self.answered = False
        self.loss: Tensor | None = None
        self.carrier: DeferredLogits | None = None
        self.cell = Cell()

    def compute(self, functions: list[str] | None) -> Tensor | None:
        """The loss, with its graph; None if the head cannot give it.

        Args:
            functions: what autograd functions of others the logits went through, None if they have no graph.
        """
        call = self.call
        call.stamp.check(call.module, call.hidden, call.name)
        if call.derived is not None:
            output = self.answer(call.module, self.rows)
        else:
            output = ask(call.module, self.rows, self, call.outer)
        loss, carrier = self.loss, self.carrier
        self.loss = self.carrier = None
        if loss is None or carrier is None or not loss.requires_grad:
            return loss
        around = _functions(output) if isinstance(output, DeferredLogits) else None
        if around != functions:
            return None  # functions beyond those around the head's call: what they do to gradients is not known
        joined: Tensor = _Join.apply(output if around else carrier, loss.detach(), self.cell)  # type: ignore[no-untyped-call]
        return joined

    def answer(self, module: nn.Linear, given: Tensor) -> Any:  # noqa: ANN401
        """The loss, set aside, and deferred logits for the hooks around the call."""
        self.answered = True
        # Not what hooks made of them now: they did so in the first call, and what they put into the graph is there.
        rows = self.rows
        dtype, call = self.call.dtype, self.call
        weight, bias = call.operands()
        again = HeadCall(module, call.name, call.counts, rows, dtype, call.vocab)
        again.derived = call.derived
        if call.spread is not None:
            again.spread = spread_of(weight)
            if again.spread is None:
                return rows.new_empty(0)
            weight, bias = local(weight), local(bias)
        elif type(weight) not in PLAIN:
            return rows.new_empty(0)  # nobody gathered it
        total = None if bias is None else bias.to(dtype)
        if self.folded.bias is not None:
            more = self.folded.bias.to(dtype)
            if again.spread is not None and more.dim() and more.shape[-1] > 1:
                more = more.narrow(-1, again.spread.start, again.spread.size)
            total = more if total is None else total + more
        with torch.autocast(rows.device.type, enabled=False):
            self.loss = self._loss(again, rows.to(dtype), weight.to(dtype), total)
        self.carrier = defer(again, weight, bias, self.loss if self.loss.requires_grad else None, self.cell)
        return self.carrier

    def _loss(self, call: HeadCall, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Any:  # noqa: ANN401
        options = {"softcap": self.folded.softcap, "scale": self.folded.scale, **self.options}
        if call.spread is None:
            arguments = rows, weight, self.target, bias, self.class_weight
            return call_op("fused_linear_cross_entropy", *arguments, **options)
        from liger_registry.transformers.vocabulary_parallel import vocabulary_parallel_cross_entropy

        return vocabulary_parallel_cross_entropy(
            rows,
            weight,
            self.target,
            call.spread.group,
            vocab_start=call.spread.start,
            bias=bias,
            class_weight=self.class_weight,
            **options,
        )


class _Join(torch.autograd.Function):
    """The loss, as an output of the deferred logits that hooks have seen."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, loss: Tensor, cell: Cell) -> Tensor:  # noqa: ANN401
        ctx.cell, ctx.shape, ctx.dtype = cell, logits.shape, logits.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        cell: Cell = ctx.cell
        cell.grad = grad
        cell.zero = torch.zeros((), dtype=ctx.dtype, device=grad.device)
        return cell.zero.expand(ctx.shape), None, None


class _Predictions:
    """Asks a head for the index of the largest logit of each row."""

    def __init__(self, call: HeadCall, rows: Tensor) -> None:
        self.call, self.rows = call, rows
        self.answered = False
        self.found: Tensor | None = None

    def answer(self, module: nn.Linear, given: Tensor) -> Any:  # noqa: ANN401
        """The indices, set aside, and deferred logits for the hooks around the call."""
        self.answered = True
        dtype = self.call.dtype
        target = torch.zeros(self.rows.shape[:-1], dtype=torch.int64, device=self.rows.device)
        weight, bias = (None if t is None else whole(t).to(dtype) for t in self.call.operands())
        _, self.found = call_op("linear_logp", self.rows.to(dtype), weight, target, bias, return_argmax=True)
        again = HeadCall(module, self.call.name, self.call.counts, self.rows, dtype, self.call.vocab)
        again.derived, again.spread = self.call.derived, self.call.spread
        return defer(again, *self.call.operands())


def _functions(logits: Tensor) -> list[str] | None:
    """The autograd functions of others between the head's own node and these logits; None if it is not reached."""
    node, found = logits.grad_fn, list[str]()
    while node is not None:
        if isinstance(node, HeadFunction._backward_cls):
            return found
        if isinstance(node, BackwardCFunction):
            found.append(type(node).__qualname__)
        node = node.next_functions[0][0] if node.next_functions else None
    return None
