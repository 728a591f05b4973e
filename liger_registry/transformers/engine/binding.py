"""Binding a replacement to one module, and taking it out again; classes and modules of code are never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import Any

from torch import nn

from liger_registry.errors import AdapterError
from liger_registry.transformers.engine.report import Row


class Nothing(Enum):
    """What an instance has of its own where it has nothing; an enum, so that it stays itself in copies and pickles."""

    ABSENT = "absent"


ABSENT: Any = Nothing.ABSENT


@dataclass(slots=True)
class Binding:
    """A replacement for one attribute of one module, to be bound by ``bind``.

    Attributes:
        op: the operation it calls.
        path: the module's path in the model.
        module: the module.
        attribute: what is replaced on it, "forward" in general.
        replacement: called with exactly what the attribute would be called with. It pickles and deep-copies, and takes
            parameters through the module on each call. An object whose attributes name the module serves replicas of
            ``nn.DataParallel`` too; a function does not.
        how: how it was recognised, for the report.
        before: what the instance had of its own there; known once it is bound.
        bound: what it has now; the same.
    """

    op: str
    path: str
    module: nn.Module
    attribute: str
    replacement: Callable[..., Any]
    how: str = ""
    before: Any = field(default=ABSENT)
    bound: Any = field(default=ABSENT)

    @property
    def row(self) -> Row:
        """The line of the report once it is bound."""
        return Row(self.op, self.path, True, self.how, type(self.module).__name__)


def place(module: nn.Module, attribute: str = "forward") -> str | None:
    """The attribute to bind where a module's own ``attribute`` is to be replaced; None if another's is in the way.

    Accelerate puts a wrapper of its own there that calls ``_old_forward``: what is replaced is then that.
    """
    own = module.__dict__.get(attribute, ABSENT)
    if own is ABSENT:
        return attribute
    inner = module.__dict__.get(f"_old_{attribute}", ABSENT)
    if inner is not ABSENT and getattr(inner, "__func__", None) is getattr(type(module), attribute, ABSENT):
        return f"_old_{attribute}"
    return None


def bind(binding: Binding) -> None:
    """Put the replacement in its place."""
    binding.before = binding.module.__dict__.get(binding.attribute, ABSENT)
    binding.bound = _method(binding.replacement)
    own = binding.module.__dict__
    # Not by setattr: a replacement that is itself a module would be registered, and change the state dict.
    own[binding.attribute] = binding.bound
    own.setdefault(_REPLICATE, Replicate(binding.module)).bound.append(binding.bound)


def _method(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement's ``__call__`` as a method.

    Compiled code is guarded by the function of a method, which the replacements of all layers share, and by the very
    object of any other callable: layers that are compiled one by one would each be compiled anew.
    """
    method = getattr(replacement, "__call__", None)  # noqa: B004 - for the method, not to ask whether there is one
    return method if isinstance(method, MethodType) and not isinstance(replacement, nn.Module) else replacement


# What nn.DataParallel calls of each module for each device.
_REPLICATE = "_replicate_for_data_parallel"


class Replicate:
    """What makes the replicas of a module with something bound to it: theirs is bound to them.

    A replica has the attributes of its module, and so would call what serves that one, with the parameters that are on
    another device.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.bound: list[Callable[..., Any]] = []

    def __call__(self) -> nn.Module:
        """A replica.

        Raises:
            AdapterError: a replacement does not show which module it is for.
        """
        module = self.module
        replica: nn.Module = getattr(type(module), _REPLICATE)(module)
        for name, value in module.__dict__.items():
            if any(value is bound for bound in self.bound):
                replica.__dict__[name] = _rebound(value, module, replica)
        return replica


def _rebound(bound: Callable[..., Any], module: nn.Module, replica: nn.Module) -> Callable[..., Any]:
    """A bound method of a copy of its replacement, for another module."""
    if not isinstance(bound, MethodType) or not hasattr(bound.__self__, "__dict__"):
        raise AdapterError(
            f"nn.DataParallel cannot replicate a {type(module).__name__} that was applied to",
            why="what an adapter bound to it does not show which module it is for",
            fix="use DistributedDataParallel, or revert() the application to this model",
        )
    again = copy.copy(bound.__self__)
    for name, value in vars(again).items():
        if value is module:
            vars(again)[name] = replica
    return MethodType(bound.__func__, again)


def unbind(binding: Binding) -> str:
    """Take the replacement out; returns "" or, where somebody has put something over it meanwhile, what was done."""
    own = binding.module.__dict__
    attribute = binding.attribute
    replicate = own[_REPLICATE]
    replicate.bound.remove(binding.bound)
    if not replicate.bound:
        del own[_REPLICATE]
    if own.get(attribute, ABSENT) is not binding.bound:
        inner = f"_old_{attribute}"
        if own.get(inner, ABSENT) is not binding.bound:
            return f"{binding.path}.{attribute} was replaced by somebody else, and is left as it is"
        # Accelerate wrapped ours: its wrapper stays and calls the class's own again.
        own[inner] = getattr(type(binding.module), attribute).__get__(binding.module)
        return ""
    if binding.before is ABSENT:
        del own[attribute]
    else:
        own[attribute] = binding.before
    return ""
