"""Two streams at once: what calls have in common shows when they meet.

Scratch that an implementation keeps between calls, a counter that its last block sets back, or a stream of its own that
waits for nothing give right results for as long as one call follows the other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from liger_registry.tuning.layouts import Poisoned, bits

Results = tuple[Any, ...]
# Calls on each stream. Both streams wait until the host is ahead: a call with its poisoned memory costs the host some
# 200 us and the GPU 20, and with a wait of half a millisecond each call had ended before the other stream's next began.
_ROUNDS = 6
# Cycles a second at the highest clock of any GPU so far, and the longest wait in seconds, should a call itself be slow.
_CLOCK, _LONGEST_S = 2_100_000_000, 0.1


def turned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Other values of the same shape: with the same ones it would not matter whose scratch is read."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.flip(0) * 0.5 if tensor.dim() else tensor * 0.5


def differs(call: Callable[..., Any], tensors: Sequence[torch.Tensor | None], huge: bool) -> bool:
    """Whether a call gives other bits beside a call with other values on a second stream.

    Args:
        call: a launch function that is deterministic, and writes into none of its arguments.
        tensors: its arguments, on a GPU.
        huge: poison memory with large numbers instead of NaN.
    """
    place = next(t.device for t in tensors if t is not None)
    arguments = tuple(tensors), tuple(turned(t) for t in tensors)
    seen: list[tuple[Results, Results]] = []
    with torch.cuda.device(place), torch.no_grad(), Poisoned(huge):
        alone = [_tuple(call(*given)) for given in arguments]
        begin = time.perf_counter()
        again = [_tuple(call(*given)) for given in arguments]
        wait = 2 * _ROUNDS * (time.perf_counter() - begin)
        torch.cuda.synchronize(place)
        del again  # these calls compiled nothing, so their time is that of the ones below
        streams = _streams(place)
        gate = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(min(wait, _LONGEST_S) * _CLOCK))  # type: ignore[no-untyped-call]
        gate.record()
        for stream in streams:
            stream.wait_event(gate)
        for _ in range(_ROUNDS):
            for stream, given, right in zip(streams, arguments, alone, strict=True):
                with torch.cuda.stream(stream):
                    seen.append((right, _tuple(call(*given))))
        # Nothing may be freed, and given to the other stream, before both are done.
        torch.cuda.synchronize(place)
    flags = [
        (bits(a) == bits(b)).all()
        for right, found in seen
        for a, b in zip(right, found, strict=True)
        if isinstance(a, torch.Tensor) and a.numel()
    ]
    return bool(flags) and not bool(torch.stack(flags).all())


@functools.cache
def _streams(place: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The same two each time: cuBLAS keeps 32 MiB for each stream that it ever saw."""
    first, second = (torch.cuda.Stream(place) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, second


def _tuple(results: Any) -> Results:  # noqa: ANN401
    return results if isinstance(results, tuple) else (results,)
