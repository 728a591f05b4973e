"""The handles of the public registry, one an operation: what every face calls."""

from __future__ import annotations

from typing import Any

from torch.compiler import is_dynamo_compiling

from liger_registry.handle import Handle
from liger_registry.runtime import registry

_handles: dict[str, Handle] = {}


def call(op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """What an operation returns for these arguments, as of its handle.

    The faces keep no handles of their own, so that modules copy, pickle and save as what they are. A look-up costs .2
    us, and ``registry.get`` 5.
    """
    if is_dynamo_compiling():
        # Traced, get() gives another object for the graph, which may not stay behind for eager calls.
        return registry.get(op)(*args, **kwargs)
    handle = _handles.get(op)
    if handle is None:
        handle = _handles[op] = registry.get(op)
    return handle(*args, **kwargs)
