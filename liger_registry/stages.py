"""Which implementations a composite's stages run: asked of whoever decides at present.

A composite, such as a linear layer with its loss, owns its slabs and its accumulation; what runs on a slab is another
operation with a problem and a decision of its own. The registry answers for calls, and everybody else (tuning,
verification, offline compiles) gets the public registry's answer without a miss being recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_registry.config import Config
    from liger_registry.device import Device
    from liger_registry.implementation import Implementation
    from liger_registry.problem import Problem

    Decide = Callable[[Problem, Device], tuple[Implementation, Config]]

_current: ContextVar[Decide | None] = ContextVar("liger_registry_stages", default=None)
_default: list[Decide] = []


@contextmanager
def deciding(decide: Decide) -> Iterator[None]:
    """Within it ``decide`` answers for stages, in this thread or task."""
    token = _current.set(decide)
    try:
        yield
    finally:
        _current.reset(token)


def by_default(decide: Decide) -> None:
    """Have ``decide`` answer where nobody else does; the public registry says so of itself."""
    _default[:] = [decide]


def stage(problem: Problem, device: Device) -> Callable[..., tuple[Any, ...]]:
    """The launch function of one stage with its device and its config filled in."""
    decide = _current.get() or _default[0]
    implementation, config = decide(problem, device)
    return functools.partial(implementation.function(), device=device, **config)
