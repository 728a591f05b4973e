"""Distillation as an operator of ``torch.library``, which a compiled graph has whole.

What is computed travels as a text, so that a graph can hold it: numbers, and where the divergence is imported from.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from liger_registry.chunked_loss import engine
from liger_registry.chunked_loss.divergence import Differentiated, Divergence
from liger_registry.chunked_loss.head import Head
from liger_registry.chunked_loss.slabs import Job, Model, compute, distilled
from liger_registry.kernels.linear_products import wide

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
NAME = "liger_registry::linear_distillation"
_INPUTS = 7
#: Made by ``text_of``, while a graph is traced that cannot have it: the losses by a call that the graph is broken at.
outside: list[Callable[..., tuple[Tensor, Tensor, Tensor]]] = []


def text_of(
    kind: type[Divergence] | None,
    beta: float | None,
    function: Callable[..., Tensor] | None,
    settings: Mapping[str, Any] | None,
    head: Sequence[Any],
    numbers: Sequence[Any],
) -> str | None:
    """A ``Job`` as text; None if its function has no name to be imported by, or settings that JSON would change.

    In a graph the latter is a break that says so, and with ``fullgraph=True`` an error.

    Args:
        kind: the class of the divergence; None for none.
        beta: its factor or share; None for a user's own.
        function: the user's own, else None.
        settings: its keyword arguments, else None.
        head: of a ``Head`` softcap, logit_scale, temperature, compact and memory_budget.
        numbers: of a ``Job`` hard, weight_soft, weight_hard, ignore_index and temperature.
    """
    softcap, logit_scale, temperature, compact, budget = head
    compact = "off" if compact == "auto" else compact  # as of every operation in a compiled graph
    divergence: list[Any] | None = None
    if kind is Differentiated:
        assert function is not None
        named = engine._named(function, settings or {})
        if named is None:
            if not outside:
                reason = "the distillation's function has no name that it can be imported by, or settings JSON changes"
                outside.append(torch.compiler.disable(distilled, reason=reason))  # type: ignore[no-untyped-call]
            return None
        divergence = [*named]
    elif kind is not None:
        divergence = [engine.path_of(kind), beta]
    return json.dumps([divergence, [softcap, logit_scale, temperature, compact, budget], [*numbers]])


# Dynamo runs a function marked so and keeps the constants it returns, instead of tracing it.
text_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _job_of(text: str) -> Job:
    divergence, head, (hard, weight_soft, weight_hard, ignore_index, temperature) = json.loads(text)
    found: Divergence | None = None
    if divergence is not None:
        path, told = divergence
        known = engine.imported(path)
        found = Differentiated(known, json.loads(told)) if isinstance(told, str) else known(told)
    return Job(found, hard, weight_soft, weight_hard, ignore_index, temperature, Head(*head))


def _forward(*args: Any) -> Results:
    states, weight, bias, teacher_states, teacher_weight, teacher_bias, labels, text, needs = args
    student, teacher = Model(states, weight, bias), Model(teacher_states, teacher_weight, teacher_bias)
    loss, soft, hard, grads = compute(_job_of(text), student, teacher, labels, tuple(needs))
    held = [states.new_empty(0) if g is None else g for g in grads]
    # An operator may not return one tensor twice.
    return loss, soft.clone() if soft is hard or soft is loss else soft, hard, held[0], held[1], held[2]


def _fake(*args: Any) -> Results:
    states, weight, bias, needs = args[0], args[1], args[2], args[-1]
    losses = [states.new_empty((), dtype=wide(states.dtype)) for _ in range(3)]
    pairs = zip((states, weight, bias), needs, strict=True)
    held = [states.new_empty(0 if t is None or not need else t.shape) for t, need in pairs]
    return losses[0], losses[1], losses[2], held[0], held[1], held[2]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:  # noqa: ANN401
    ctx.save_for_backward(*output[3:])
    ctx.needs = [need and t is not None for t, need in zip(inputs[:3], inputs[-1], strict=True)]


def _backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    held = [
        (g.to(grad.dtype) * grad).to(g.dtype) if need else None
        for g, need in zip(ctx.saved_tensors, ctx.needs, strict=True)
    ]
    return *held, *[None] * (_INPUTS + 2 - len(held))


_library = torch.library.Library("liger_registry", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear_distillation(Tensor states, Tensor weight, Tensor? bias, Tensor teacher_states, Tensor teacher_weight, "
    "Tensor? teacher_bias, Tensor labels, str job, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("linear_distillation", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(NAME, _fake, lib=_library)
torch.library.register_autograd(NAME, _backward, setup_context=_setup, lib=_library)


def by_operator(text: str, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, divergence and cross-entropy, of which the first is differentiable, by the operator.

    Args:
        text: what is computed, see ``text_of``.
        tensors: of the student hidden states, weight and bias, of the teacher the same, and labels.
    """
    enabled = torch.is_grad_enabled()
    needs = [enabled and t is not None and t.requires_grad for t in tensors[:3]]
    found = torch.ops.liger_registry.linear_distillation(*tensors, text, needs)
    return found[0], found[1].detach(), found[2].detach()
