"""Losses of groups of sequences, as functions of their tokens' log-probabilities that are named by where they are.

A group has some sequences (``ways``) of equal length. Sequence ``n`` of all is the ``n // groups``-th of group ``n %
groups``, so that a batch of chosen and then rejected sequences has pairs as its groups.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_registry.errors import UnsupportedOptionError

#: ``(logp, constants)`` to the terms of groups, (groups,): logp is (ways, groups, length), constants (..., columns).
GroupLoss = Callable[[Tensor, Tensor], Tensor]


def logistic(logp: Tensor, constants: Tensor, *, beta: float = 1.0) -> Tensor:
    """``share * log(1 + exp(-beta * margin))``, of the first sequence's score over those of the others.

    Args:
        logp: (ways, groups, length).
        constants: (ways, groups, length, 3): the weights of log-probabilities in their sequence's score, what is taken
            from that, and the group's share of the loss, of which each sequence's and the group's first token counts.
        beta: a factor on the margin.
    """
    scores = (logp * constants[..., 0]).sum(-1) - constants[..., 0, 1]
    margin = 2 * scores[0] - scores.sum(0)
    return torch.logaddexp(-beta * margin, torch.zeros_like(margin)) * constants[0, :, 0, 2]


def linear(logp: Tensor, constants: Tensor) -> Tensor:
    """Each token's log-probability times its first constant, plus its second; nothing depends on how tokens group."""
    return (logp * constants[..., 0] + constants[..., 1]).sum((0, 2))


# A loss whose settings follow a schedule has new ones with every step.
@functools.lru_cache(maxsize=1024)
def function_of(path: str, settings: str) -> GroupLoss:
    """The function that ``module:name`` names, with settings from JSON as keyword arguments.

    Raises:
        UnsupportedOptionError: there is none, or the settings are none.
    """
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        told = json.loads(settings)
        if not callable(found) or not isinstance(told, dict):
            raise TypeError("the function must be callable, its settings an object")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UnsupportedOptionError(
            f"function={path!r} with settings={settings!r} is no loss of groups",
            why=f"{type(error).__name__}: {error}",
            fix="pass 'module:name' of a function that can be imported, and its keyword arguments as JSON",
        ) from None
    return functools.partial(found, **told)


@contextmanager
def recording() -> Iterator[None]:
    """Within it tensor operations record for autograd, wherever the caller stands.

    Inside of a ``torch.library`` kernel, below autograd, they would not; the keys that hide it are lifted.
    """
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    hidden = (keys.AutogradOther, keys.AutogradFunctionality, keys.AutogradCPU, keys.AutogradCUDA, keys.ADInplaceOrView)
    for key in hidden:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def terms_and_slopes(function: GroupLoss, logp: Tensor, constants: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    """The sum of the terms of groups, 0-dim, and its derivatives by logp; without derivatives 0 in their place.

    Args:
        function: the loss.
        logp: (ways, groups, length).
        constants: (ways, groups, length, columns).
        needed: whether derivatives are wanted.
    """
    if not needed:
        with torch.no_grad():
            return function(logp, constants).sum(), torch.zeros_like(logp)
    with recording():
        leaf = logp.detach().requires_grad_()
        total = function(leaf, constants).sum()
        if not total.requires_grad:  # a function that reads none of them
            return total.detach(), torch.zeros_like(logp)
        (slopes,) = torch.autograd.grad(total, leaf)
    return total.detach(), slopes
