"""What stands in the place of a module's own method: the method built again, bound to the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from liger_registry.transformers.engine.binding import Binding, place
from liger_registry.transformers.engine.rebuild import CannotRebuild
from liger_registry.transformers.engine.report import Row


class Rebuilt:
    """A method of one module, built again; an object of its own, so that it copies and pickles with the module.

    The function itself belongs to the class of the module and is found again from it: copies share it, and after
    unpickling it is made from the code that is there then.

    Args:
        module: whose method it is.
        attribute: the method's name.
    """

    def __init__(self, module: nn.Module, attribute: str = "forward") -> None:
        self.module = module
        self.attribute = attribute
        self.function = self._find()

    def _find(self) -> Callable[..., Any]:
        """The function for this module's class; the class's own if there is none."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call it on the module."""
        return self.function(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.function = self._find()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.module).__name__}.{self.attribute}>"


def rebound(op: str, path: str, made: type[Rebuilt], module: nn.Module, method: str, how: str) -> Binding | Row:
    """The binding of a method built again, or why there can be none.

    Args:
        op: the operation that is in it.
        path: of the module.
        made: what stands in the method's place.
        module: whose method it is.
        method: its name.
        how: for the report.
    """
    kind = type(module).__name__
    attribute = place_of(module, method)
    if attribute is None:
        return Row(op, path, False, f"{kind}.{method} was replaced by somebody else", kind)
    try:
        return Binding(op, path, module, attribute, made(module, method), how)
    except CannotRebuild as error:
        return Row(op, path, False, error.reason, kind)


def rebuilt_of(own: object) -> Rebuilt | None:
    """What is behind an attribute of a module if it is a method built again."""
    behind = getattr(own, "__self__", None)
    return behind if isinstance(behind, Rebuilt) else None


def place_of(module: nn.Module, method: str) -> str | None:
    """The attribute to bind where a module's method is to be replaced; None if somebody else's is in the way."""
    own = module.__dict__.get(method)
    plain = getattr(type(module), method, None)
    if getattr(own, "__func__", None) is plain and getattr(own, "__self__", None) is module:
        return method  # bound by somebody who put back what he had taken
    return place(module, method)
