"""Binding a replacement to one module, and taking it out again; classes and modules of code are never touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import nn

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
            parameters through the module on each call.
        how: how it was recognised, for the report.
        before: what the instance had of its own there; known once it is bound.
    """

    op: str
    path: str
    module: nn.Module
    attribute: str
    replacement: Callable[..., Any]
    how: str = ""
    before: Any = field(default=ABSENT)

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
    # Not by setattr: a replacement that is itself a module would be registered, and change the state dict.
    binding.module.__dict__[binding.attribute] = binding.replacement


def unbind(binding: Binding) -> str:
    """Take the replacement out; returns "" or, where somebody has put something over it meanwhile, what was done."""
    own = binding.module.__dict__
    attribute = binding.attribute
    if own.get(attribute, ABSENT) is not binding.replacement:
        inner = f"_old_{attribute}"
        if own.get(inner, ABSENT) is not binding.replacement:
            return f"{binding.path}.{attribute} was replaced by somebody else, and is left as it is"
        # Accelerate wrapped ours: its wrapper stays and calls the class's own again.
        own[inner] = getattr(type(binding.module), attribute).__get__(binding.module)
        return ""
    if binding.before is ABSENT:
        del own[attribute]
    else:
        own[attribute] = binding.before
    return ""
