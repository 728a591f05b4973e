"""Asking a head for something other than its logits, through its own call.

What gathers, casts, moves or counts the head's weights (FSDP, ZeRO, PEFT, accelerate) does so in hooks and wrappers
around the call of the module. So whatever needs the weights calls the module again, with a request that waits for the
bound ``forward`` inside of it.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import Tensor, nn


class Request(Protocol):
    """What the bound forward is to do in place of what it does by itself."""

    answered: bool

    def answer(self, module: nn.Linear, given: Tensor) -> Any:  # noqa: ANN401
        """Do it, with the head's weights there; returns what the hooks around the call see as its output.

        Args:
            module: the head.
            given: what the forward was called with, after hooks.
        """


class _Waiting(threading.local):
    def __init__(self) -> None:
        self.requests: list[tuple[nn.Linear, Request]] = []


_waiting = _Waiting()


def ask(module: nn.Linear, argument: Tensor, request: Request, outer: nn.Module) -> Any:  # noqa: ANN401
    """Call a head, or what is around it, for the sake of a request; returns what came out.

    ``request.answered`` says whether the request was seen.
    """
    entry = (module, request)
    _waiting.requests.append(entry)
    try:
        return outer(argument)
    finally:
        if entry in _waiting.requests:
            _waiting.requests.remove(entry)


def take(module: nn.Linear) -> Request | None:
    """The request that waits for this head in this thread, which is then answered; None in an ordinary call."""
    if _waiting.requests and _waiting.requests[-1][0] is module:
        return _waiting.requests.pop()[1]
    return None
