"""Guards: whether the tensors of a call are like those of another, asked in one call of C++.

They are those that ``torch.compile`` holds its graphs to. A guard compares the exact type, the dispatch keys under the
thread's state (so a dispatch mode or a transform of ``torch.func`` differs), dtype, device, sizes, strides and
``requires_grad``. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch


def never(*tensors: object) -> bool:
    """The guard that holds for nothing."""
    return False


def make_guard(tensors: Sequence[torch.Tensor | None]) -> Callable[..., bool]:
    """The guard of a call's tensors; of an absent one the caller has to see itself that it is absent.

    Returns ``never`` where this version of torch has no such guards: each call then goes by its key.
    """
    present = [t is not None for t in tensors]
    given = [t for t in tensors if t is not None]
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        if not check(*given):
            return never
    except (AttributeError, TypeError, RuntimeError):
        return never
    if all(present):
        return check
    return lambda *tensors: check(*compress(tensors, present))
