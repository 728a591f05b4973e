"""Measuring: interquartile means of interleaved calls between two looks at a fixed anchor.

The mean of the middle half is as deaf to outliers as a median and finer than the clock: events tick in steps that are
3 % of a kernel of 10 us, so medians of such kernels differ by a whole step or not at all.

An anchor, a copy of fixed size, runs before and after each block of samples. If it took another time after than before,
the machine changed while the block ran, and the block is noisy whatever its own spread says.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from liger_registry.device import CPU_CLOCK, CUDA_EVENTS

#: The anchor's relative change above which a block is noisy.
DRIFT = 0.03
#: One call's time on the CPU, in seconds, above which a problem is left out.
CPU_CALL_S = 0.5
_ANCHORS = 7
# Seconds for which the GPU is held up while the host enqueues a call: at first, at least, at most.
_HOLD_S, _LEAST_HOLD_S, _MOST_HOLD_S = 1e-3, 60e-6, 20e-3
# Cycles of a second of a sleep: more than GPUs have, so that it is never shorter than asked for.
_CYCLES = 3e9

Call = Callable[[], Any]


def protocol_of(torch_device: torch.device | str) -> str:
    """The measuring protocol for a torch device."""
    return CPU_CLOCK if torch.device(torch_device).type == "cpu" else CUDA_EVENTS


class Timer(Protocol):
    """What measures one call, and the anchor, in microseconds.

    Attributes:
        protocol: its name.
        overhead_us: about how long a sample takes beside the call itself.
    """

    protocol: str
    overhead_us: float

    def time(self, call: Call) -> float:
        """Microseconds of one call."""

    def anchor(self) -> float:
        """Microseconds of the anchor, a median of a few."""


class CpuTimer:
    """``cpu-clock-1``: the wall clock around a call, with as many threads as torch has.

    Args:
        clock: seconds; a test's own in place of ``time.perf_counter``.
    """

    protocol = CPU_CLOCK
    overhead_us = 0.0

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # 4 MiB: larger than a core's own caches, and 1 ms at most.
        self._source = torch.ones(1 << 20)
        self._target = torch.empty_like(self._source)

    def time(self, call: Call) -> float:
        """Microseconds of one call."""
        start = self._clock()
        call()
        return (self._clock() - start) * 1e6

    def anchor(self) -> float:
        """Microseconds of a copy of 4 MiB."""
        return statistics.median(self.time(lambda: self._target.copy_(self._source)) for _ in range(_ANCHORS))


def _event() -> Any:  # noqa: ANN401
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class CudaTimer:
    """``cuda-events-1``: events around a call whose kernels wait in the queue, with the L2 cache flushed before.

    The queue is held up by a sleep of the GPU while the host enqueues the call, so that what is measured is the GPU's
    time: training runs ahead of the GPU in the same way.
    """

    protocol = CUDA_EVENTS
    # The hold, the flush of 128 MiB and two synchronisations; a hold of 1 ms for every call made it 1,200.
    overhead_us = 200.0

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self._device = device
        self._holds: WeakKeyDictionary[Call, float] = WeakKeyDictionary()
        with torch.cuda.device(device):
            self._flush = torch.empty(max(2 * l2_bytes, 64 << 20), dtype=torch.int8, device=device)
            self._source = torch.ones(16 << 20, device=device)
            self._target = torch.empty_like(self._source)

    def time(self, call: Call) -> float:
        """Microseconds of one call."""
        hold = self._holds.get(call, _HOLD_S)
        elapsed, host = self._once(call, hold)
        if host > 0.9 * hold and host < _MOST_HOLD_S:
            elapsed, host = self._once(call, 2 * host)
        # As long as this call needs, because the hold is most of what a sample of a small problem takes.
        self._holds[call] = min(max(2 * host, _LEAST_HOLD_S), _MOST_HOLD_S)
        return elapsed

    def _once(self, call: Call, hold: float) -> tuple[float, float]:
        """Microseconds that the GPU took, and seconds that the host took to enqueue."""
        with torch.cuda.device(self._device):
            start, end = _event(), _event()
            torch.cuda.synchronize()
            enqueue = time.perf_counter()
            _sleep(int(hold * _CYCLES))
            self._flush.zero_()
            start.record()
            result = call()
            end.record()
            host = time.perf_counter() - enqueue
            torch.cuda.synchronize()
            del result
            return float(start.elapsed_time(end)) * 1e3, host

    def anchor(self) -> float:
        """Microseconds of a copy of 64 MiB."""
        return statistics.median(self.time(lambda: self._target.copy_(self._source)) for _ in range(_ANCHORS))


@dataclass(frozen=True, slots=True)
class Timing:
    """One call's time.

    Attributes:
        time_us: the interquartile mean in microseconds.
        noise: its relative uncertainty: the interquartile range over the root of the number of samples.
    """

    time_us: float
    noise: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The timing of some samples in microseconds."""
        if len(samples) < 4:
            return cls(statistics.median(samples), 0.0)
        quarter = len(samples) // 4
        middle = statistics.fmean(sorted(samples)[quarter : len(samples) - quarter])
        if middle <= 0:
            return cls(middle, 0.0)
        low, _, high = statistics.quantiles(samples, n=4)
        return cls(middle, (high - low) / middle / len(samples) ** 0.5)


@dataclass(frozen=True, slots=True)
class Block:
    """Timings that were taken in turn.

    Attributes:
        timings: one a call, in order.
        drift: the anchor's relative change between the block's beginning and its end.
    """

    timings: tuple[Timing, ...]
    drift: float

    @property
    def noisy(self) -> bool:
        """Whether the machine changed while the block ran."""
        return self.drift > DRIFT

    @property
    def noise(self) -> float:
        """The relative noise a comparison within the block is subject to."""
        return max([self.drift, *(t.noise for t in self.timings)])


def measure(
    calls: Sequence[Call],
    timer: Timer,
    budget_us: float,
    *,
    least: int = 3,
    most: int = 400,
    stop_us: float = math.inf,
    starting: Callable[[int], None] = lambda index: None,
) -> Block:
    """Time calls in turn: one of each, then the next of each.

    Args:
        calls: what to time.
        timer: measures one call.
        budget_us: about how long all samples of one call may take together, in microseconds.
        least: samples of each call, whatever they cost.
        most: samples of each call at most.
        stop_us: a call of which the first samples all took longer, in microseconds, is not sampled further.
        starting: told the index of each call before its first run.
    """
    first = []
    for index, call in enumerate(calls):
        starting(index)
        call()  # compiles, loads and fills caches
        first.append(timer.time(call))
    slowest = max(first, default=0.0)
    sample = slowest + timer.overhead_us
    repeats = max(least, min(most, int(budget_us / sample) if sample > 0 else least))
    before = timer.anchor()
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for index, call in enumerate(calls):
            if len(samples[index]) != least or min(samples[index]) <= stop_us:
                samples[index].append(timer.time(call))
    after = timer.anchor()
    drift = abs(after - before) / min(after, before) if min(after, before) > 0 else 0.0
    return Block(tuple(map(Timing.of, samples)), drift)


def extra_bytes(call: Call, torch_device: torch.device) -> int | None:
    """The peak of memory a call takes beyond what it returns, in bytes; None where nobody counts it."""
    if torch_device.type != "cuda":
        return None
    torch.cuda.synchronize(torch_device)
    torch.cuda.reset_peak_memory_stats(torch_device)
    before = torch.cuda.memory_allocated(torch_device)
    results = call()
    torch.cuda.synchronize(torch_device)
    peak = torch.cuda.max_memory_allocated(torch_device)
    kept = torch.cuda.memory_allocated(torch_device)
    del results
    return max(0, peak - max(kept, before))
