"""Gradients by recomputing a function under autograd, wherever the caller stands.

A backward that is called inside a ``torch.library`` kernel runs below autograd: tensor operations there record nothing.
The dispatch keys that hide autograd are lifted for the recomputation and put back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def gradients(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor | None],
    grad_outputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``function(*inputs)`` with respect to the inputs that need one.

    Args:
        function: differentiable PyTorch; returns a tensor or a tuple of tensors.
        inputs: its arguments; None where an optional one is absent.
        grad_outputs: the gradient of each output, of its shape and dtype.
        needs: for each input, whether its gradient is wanted.

    Returns:
        For each input its gradient, or None where none is wanted or the input is absent.
    """
    import torch

    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    # Each removes the functionality that AutoDispatchBelowAutograd excludes, whatever the backend.
    for key in (
        keys.AutogradOther,
        keys.AutogradFunctionality,
        keys.AutogradCPU,
        keys.AutogradCUDA,
        keys.ADInplaceOrView,
    ):
        excluded = excluded.remove(key)
    leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    wanted = [x for x, need in zip(leaves, needs, strict=True) if need and x is not None]
    if not wanted:
        return tuple(None for _ in inputs)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # An output that depends on nothing wanted, or holds integers, has no graph.
        pairs = [(y, g) for y, g in zip(outputs, grad_outputs, strict=True) if y.requires_grad and g is not None]
        if not pairs:
            return tuple(
                torch.zeros_like(x) if need and x is not None else None for x, need in zip(inputs, needs, strict=True)
            )
        roots, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(roots, wanted, grads, allow_unused=True, materialize_grads=True))
    return tuple(next(found) if need and x is not None else None for x, need in zip(leaves, needs, strict=True))
