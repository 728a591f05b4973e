"""Calling part of a module that FSDP shards, with its parameters gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from liger_registry.errors import InvalidInputError


class _FSDPForwardRedirection:
    """Calls a function in place of a wrapped module's forward, between FSDP's own steps before and after it.

    FSDP gathers parameters in the wrapper's forward alone, so what reads a submodule's weight must run in there.
    """

    def __call__(
        self, wrapper_module: FullyShardedDataParallel, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:  # noqa: ANN401
        """What ``method`` returns.

        Args:
            wrapper_module: the FSDP module that holds what ``method`` reads.
            method: called once with all other arguments, after FSDP has cast and moved them.
            *args: for ``method``.
            **kwargs: for ``method``.

        Raises:
            InvalidInputError: the module is not wrapped in FSDP.
        """
        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise InvalidInputError(
                f"{type(wrapper_module).__name__} is no FSDP module", fix="call the function on the module directly"
            )
        inner = wrapper_module._fsdp_wrapped_module
        # Whatever was bound on the instance comes back, and the class's own forward stays where none was.
        before = inner.__dict__.get("forward")

        def restore() -> None:
            if before is None:
                inner.__dict__.pop("forward", None)
            else:
                inner.forward = before

        def instead(*given: Any, **named: Any) -> Any:  # noqa: ANN401
            restore()  # the function may call the module itself
            return method(*given, **named)

        inner.forward = instead
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            if inner.__dict__.get("forward") is instead:
                restore()
