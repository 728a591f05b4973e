"""The construction hook: models of some types are applied to as they are made.

``transformers.PreTrainedModel.post_init``, which every model calls at the end of its construction, is the one attribute
of a class that this package ever replaces: while at least one type is armed, and never otherwise.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from liger_registry.transformers.engine.apply import Applied, applied_to, apply
from liger_registry.transformers.engine.report import Report, Row

_lock = threading.RLock()
_armed: dict[str, Armed] = {}


class Hook(NamedTuple):
    """What stands in the class, and what stood there."""

    original: Callable[..., Any]
    ours: Callable[..., Any]


_hook: Hook | None = None


class Armed:
    """The models of some types, until ``revert``: those built meanwhile have the operations in them.

    Attributes:
        types: the model types.
        report: says so, followed by the rows of the last model that was built.
    """

    def __init__(self, types: tuple[str, ...], options: Mapping[str, Any]) -> None:
        self.types = types
        self.options = dict(options)
        self.report = Report(
            f"models of type {', '.join(types)}, as they are built",
            [Row("", "", True, "armed PreTrainedModel.post_init until revert()", "PreTrainedModel")],
        )
        # What was applied here, as against what a user applied to a part; a handle holds its model, hence weakly.
        self._made: weakref.WeakSet[Applied] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Armed for {', '.join(self.types)}>"

    def __enter__(self) -> Armed:
        return self

    def __exit__(self, *error: object) -> None:
        self.revert()

    def built(self, model: nn.Module) -> None:
        """Apply to a model that has just been built; what was applied to its parts before is taken back first."""
        for part in model.modules():
            inner = applied_to(part)
            if inner is not None and inner in self._made:
                inner.revert()
        applied = apply(model, **self.options)
        self._made.add(applied)
        self.report.rows = [self.report.rows[0], *applied.report.rows]
        self.report.materialised = applied.report.materialised

    def revert(self) -> None:
        """Stop; models that were built stay as they are."""
        with _lock:
            for model_type in self.types:
                if _armed.get(model_type) is self:
                    del _armed[model_type]
            if not _armed:
                _uninstall()


def arm(types: tuple[str, ...], options: Mapping[str, Any]) -> Armed:
    """Apply to every model of these types that is built from now on, with these keywords of ``apply``."""
    armed = Armed(types, options)
    with _lock:
        for model_type in types:
            _armed[model_type] = armed
        _install()
    return armed


def _install() -> None:
    global _hook
    from transformers import PreTrainedModel

    if _hook is not None:
        return
    original: Callable[..., Any] = PreTrainedModel.post_init

    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = original(self, *args, **kwargs)
        armed = _armed.get(getattr(self.config, "model_type", ""))
        if armed is not None:
            armed.built(self)
        return result

    _hook = Hook(original, post_init)
    type.__setattr__(PreTrainedModel, "post_init", post_init)


def _uninstall() -> None:
    global _hook
    from transformers import PreTrainedModel

    # Where somebody has wrapped the hook it stays inside their wrapper, with nothing armed.
    if _hook is not None and PreTrainedModel.__dict__["post_init"] is _hook.ours:
        type.__setattr__(PreTrainedModel, "post_init", _hook.original)
        _hook = None
