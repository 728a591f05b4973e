"""What all replacements share: when they step back, what they call, and which modules they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.compiler import is_dynamo_compiling

from liger_registry.handle import PLAIN
from liger_registry.transformers._handles import call
from liger_registry.transformers.engine.binding import place

Operate = Callable[..., Any]

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def takes(*tensors: object) -> bool:
    """Whether an operation may take the place of a module's own code for these.

    It may not for subclasses of tensors, which have a meaning of their own (DTensor, fake tensors), in transforms of
    ``torch.func``, in forward-mode differentiation, and while ``torch.jit`` traces.
    """
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return False
    if is_dynamo_compiling():
        return True
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return torch._C._get_tracing_state() is None


def reference(op: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
    """An operation as plain PyTorch computes it, for probes: no implementation is chosen, nothing is tuned."""
    from liger_registry.runtime import registry

    return registry.get(op).op.reference(*args, **options)


def usable_place(module: nn.Module, attribute: str = "forward") -> tuple[str, str]:
    """Where to bind on a module, and "" or why not.

    A module is left alone whose own code would not run anyway: its forward was replaced, or its tensors are computed.
    """
    if hasattr(module, "parametrizations"):
        return "", "its parameters are parametrised"
    where = place(module, attribute)
    if where is None:
        return "", f"its {attribute} was replaced on this instance"
    return where, ""


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, which run in its call and would not in one of an operation."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(module.__dict__.get(name) for name in names)


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written in a report: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def float_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first floating parameter; float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.dtype in FLOATING), torch.float32)


__all__ = ["FLOATING", "call", "dtype_name", "float_dtype", "hooked", "reference", "takes", "usable_place"]
