"""The engine of all losses over log-probabilities: what touches logits is an operation of the registry.

``linear_logp`` gives each token's log-probability for any loss, in two phases. A loss that is a sum over groups of
sequences, each of whose terms depends on that group's log-probabilities and on numbers known beforehand, goes to
``linear_sequence_loss``, which may compute the gradients of a group while its logits are there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss.head import PLAIN, Head, applied
from liger_registry.runtime import registry

Tensor = torch.Tensor


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def imported(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """A function, or what ``module:name`` names."""
    return _import(function) if isinstance(function, str) else function


def path_of(function: Callable[..., Any]) -> str | None:
    """``module:name`` of a function that can be imported so, else None."""
    path = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    try:
        return path if _import(path) is function else None
    except (ImportError, AttributeError, ValueError):
        return None


def fixed(value: Any) -> Any:  # noqa: ANN401
    """Numbers, lists and mappings of them as constants of the graph that is being compiled; eagerly as they are.

    A number that differs from that of an earlier graph, such as the beta of a second loss or of a schedule, would be a
    symbol, of which no text can be made.
    """
    if not torch.compiler.is_compiling():
        return value
    if isinstance(value, Mapping):
        return {name: fixed(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [fixed(part) for part in value]
    if isinstance(value, (bool, int, float)):
        return torch.fx.experimental.symbolic_shapes.guard_scalar(value)
    return value


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype of log-probabilities of hidden states: fp32, for float64 float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    head: Head = PLAIN,
) -> Tensor:
    """Each token's log-probability under an output head, differentiable, in fp32 (float64: float64); 0 where ignored.

    Args:
        hidden: (..., hidden), floating.
        weight: (vocab, hidden), of its dtype.
        target: (...), int64.
        bias: (vocab,), or None.
        ignore_index: the target of tokens that do not count.
        head: how logits are made.
    """
    operation = registry.get("linear_logp", memory_budget=head.memory_budget)
    found: Tensor = operation(hidden, weight, target, bias, **head.options(ignore_index))
    return found


@torch.no_grad()
def log_sum_squares(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    head: Head = PLAIN,
) -> Tensor:
    """``log(sum of p * p)`` over the vocabulary for each token; 0 where ignored. Costs two products.

    Logits twice as large have the logsumexp whose difference to twice the own one it is.
    """
    operation = registry.get("linear_logp", memory_budget=head.memory_budget)
    options = head.options(ignore_index)
    _, once = operation(hidden, weight, target, bias, return_logsumexp=True, **options)
    options["scale"], options["softcap"] = 2 * options["scale"], 2 * options["softcap"]
    _, twice = operation(hidden, weight, target, bias, return_logsumexp=True, **options)
    return twice - 2 * once  # type: ignore[no-any-return]


@torch.no_grad()
def logit_sums(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """For each sequence the sum of its logits over tokens and vocabulary, (sequences,), without any logits.

    They are those that the head itself gives, before scale, cap and temperature. The sum of ``hidden @ weight.T`` is
    the product of both sums.

    Args:
        hidden: (sequences, tokens, hidden).
        weight: (vocab, hidden).
        bias: (vocab,), or None.
    """
    dtype = wide(hidden)
    # Products of elements: a matrix product might be rounded to TF32.
    found = (hidden.sum(1, dtype=dtype) * weight.sum(0, dtype=dtype)).sum(-1)
    return found if bias is None else found + hidden.shape[1] * bias.sum(dtype=dtype)


@torch.no_grad()
def reference_logps(
    face: str,
    hidden: Tensor,
    weight: Tensor | nn.Module,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    head: Head = PLAIN,
) -> Tensor:
    """Each token's log-probability under a reference model, without a graph; arguments as of ``token_logps``."""
    hidden, weight, bias = applied(face, hidden, weight, bias)
    return token_logps(hidden, weight, target, bias, ignore_index=ignore_index, head=head)


def grouped(tensor: Tensor, ways: int) -> Tensor:
    """(ways * groups, ...) as (ways, groups, ...)."""
    return tensor.reshape(ways, tensor.shape[0] // ways, *tensor.shape[1:])


def sequence_loss(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_constants: Tensor,
    sequence_constants: Tensor,
    *,
    ways: int,
    settings: Mapping[str, Any],
    separable: bool,
    ignore_index: int,
    head: Head,
) -> tuple[Tensor, Tensor]:
    """A sum of terms, and the log-probabilities they are made of.

    Args:
        function: ``(logp, constants, **settings)`` to a term a group, (groups,), where logp is (ways, groups, tokens)
            and constants (..., columns): those of sequences, the same for all their tokens, and then those of tokens.
        hidden: (sequences, tokens, hidden); sequence ``n`` is way ``n // groups`` of group ``n % groups``.
        weight: (vocab, hidden).
        target: (sequences, tokens), int64.
        bias: (vocab,), or None.
        token_constants: (sequences, tokens, any), in the dtype of log-probabilities.
        sequence_constants: (sequences, any), in that dtype.
        ways: how many sequences a group has.
        settings: of the function, of which one named ``function`` may be given by its name instead.
        separable: whether each term depends on its own group alone. Gradients are then computed in forward, unless the
            function has no name that it can be imported by, or settings that JSON would change.
        ignore_index: the target of tokens that do not count.
        head: how logits are made.

    Returns:
        The sum of the terms, 0-dim and differentiable, and logp (sequences, tokens), without a graph.
    """
    broad = sequence_constants[:, None].expand(-1, target.shape[1], -1)
    constants = torch.cat([broad, token_constants], -1)
    named = _named(function, fixed(settings)) if separable and _fits(hidden) else None
    if named is not None and target.numel():
        operation = registry.get("linear_sequence_loss", memory_budget=head.memory_budget)
        path, text = named
        loss, logp = operation(
            hidden,
            weight,
            target,
            constants,
            bias,
            function=path,
            settings=text,
            ways=ways,
            length=target.shape[1],
            **head.options(ignore_index),
        )
        return loss, logp
    logp = token_logps(hidden, weight, target, bias, ignore_index=ignore_index, head=head)
    if not target.numel():
        return logp.sum(), logp.detach()
    terms = function(grouped(logp, ways), grouped(constants, ways), **settings)
    return terms.sum(), logp.detach()


def _fits(hidden: Tensor) -> bool:
    """Whether gradients may be held until the loss is multiplied by its scale: in fp16 they would be too small."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return torch.float16 not in (dtype, hidden.dtype)


def _named(function: Callable[..., Any], settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """A function's name and its settings as text; None where there is no name, or the text would not give them back."""
    path, named = path_of(function), dict(settings)
    if callable(named.get("function")):
        named["function"] = path_of(named["function"])
    if path is None or named.get("function", path) is None:
        return None
    try:
        text = json.dumps(named, sort_keys=True)
        return (path, text) if json.loads(text) == named else None
    except (TypeError, ValueError):
        return None


# Dynamo runs a function marked so and keeps the constants it returns, instead of tracing it.
_named._dynamo_marked_constant = True  # type: ignore[attr-defined]
