"""Clocks, and taking turns.

Decisions, each with its reason:

- **GPU time from graph replays** for what can be captured: host time is not in it, which ``host`` measures apart. A
  graph holds as many calls as take 1.5 ms, so that the 5 to 10 us of its launch stay under a percent.
- **Calls of a graph go round among several sets of buffers**, together four times the second-level cache: a single set
  of a narrow problem would be read from the cache, which no training step does. All forwards come first, then all
  backwards, so that backward finds a cold cache as behind a whole model. Results stay alive within a round, or each
  call would write over the last one's lines while they are in the cache.
- **Backward is forward-and-backward less forward**, per round, both in turn: what autograd adds is in it.
- **Losses by events**, since some peers wait for the device in their forward and cannot be captured. The queue is held
  up by a sleep while the host enqueues, so that launches are no gaps; a call that waits for the device pays for it, as
  users do.
- **The cache is flushed** before each sample by writing twice its size.
- **Candidates take turns in every round**, and the order rotates: a card's clock falls as it warms up, and whoever came
  last would look slow. The figure is the median over rounds; the spread is the interquartile range over it.
- On the CPU there is the wall clock alone; it serves tests and is no measurement of anything.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: Milliseconds of a graph, at least; sets of buffers together, in sizes of the second-level cache, at least.
LEAST_MS, CACHES = 1.5, 4
#: Sets of buffers, and rounds over them in one graph, at most.
MOST_SETS, MOST_SWEEPS = 64, 64
#: Cycles for which the queue is held up: .1 ms at 2 GHz for a graph's launch, .5 ms for a loss's.
HOLD_GRAPH, HOLD_CALL = 200_000, 1_000_000
#: The same while a whole sweep is enqueued without a graph, to see how long it takes: 5 ms.
HOLD_SWEEP = 10_000_000
#: The cache where torch does not say.
L2_BYTES = 64 << 20

Sample = Callable[[], float]
Sweep = Callable[[], object]


class Clock(Protocol):
    """What turns a sweep of calls into something that can be sampled.

    Attributes:
        graphs: whether calls can be captured.
    """

    graphs: bool

    def sets(self, size: int) -> int:
        """How many sets of buffers of so many bytes each are gone round among."""

    def graph(self, sweep: Sweep, calls: int) -> Sample:
        """Samples of a sweep of calls: milliseconds of one, from replays."""

    def events(self, call: Sweep) -> Sample:
        """Samples of one call in milliseconds."""


class CpuClock:
    """The wall clock."""

    graphs = False

    def sets(self, size: int) -> int:
        """Two, so that going round is gone through in tests too."""
        return 2

    def graph(self, sweep: Sweep, calls: int) -> Sample:
        """Milliseconds of one call of a sweep."""
        once = self.events(sweep)
        return lambda: once() / calls

    def events(self, call: Sweep) -> Sample:
        """Milliseconds of a call."""
        call()

        def sample() -> float:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3

        return sample


class CudaClock:
    """Events and graphs on a stream of its own.

    Args:
        device: the GPU.
    """

    graphs = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.l2 = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or L2_BYTES
        self._flush = torch.empty(2 * self.l2, dtype=torch.int8, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def sets(self, size: int) -> int:
        """As many as exceed the second-level cache several times."""
        return max(1, min(MOST_SETS, -(-CACHES * self.l2 // max(size, 1))))

    def graph(self, sweep: Sweep, calls: int) -> Sample:
        """Milliseconds of one call, from replays of a graph of some sweeps."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                sweep()
            once = self._elapsed(sweep, HOLD_SWEEP)
            sweeps = max(1, min(MOST_SWEEPS, round(LEAST_MS / max(once, 1e-3) + 0.5)))
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # a graph that the collector frees during a capture would spoil it
            try:
                graph.capture_begin()
                try:
                    for _ in range(sweeps):
                        sweep()
                finally:
                    graph.capture_end()
            finally:
                gc.enable()
            graph.replay()
            stream.synchronize()

        def sample() -> float:
            with torch.cuda.stream(stream):
                return self._elapsed(graph.replay, HOLD_GRAPH) / sweeps / calls

        return sample

    def events(self, call: Sweep) -> Sample:
        """Milliseconds of one call by events."""
        for _ in range(2):
            call()
        torch.cuda.synchronize(self._device)
        return lambda: self._elapsed(call, HOLD_CALL)

    def _elapsed(self, call: Sweep, hold: int) -> float:
        """Milliseconds of what a call enqueues on the current stream."""
        begin, end = _event(), _event()
        torch.cuda.synchronize(self._device)
        self._flush.zero_()
        torch.cuda._sleep(hold)  # type: ignore[no-untyped-call]
        begin.record()
        found = call()
        end.record()
        torch.cuda.synchronize(self._device)
        del found
        return float(begin.elapsed_time(end))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, beginning with another one each turn."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def in_turn(samples: Mapping[str, Sample], rounds: int) -> dict[str, list[float]]:
    """So many samples of each, one of each a round, whose order rotates."""
    seen: dict[str, list[float]] = {name: [] for name in samples}
    for turn in range(rounds):
        for name in rotated(list(samples), turn):
            seen[name].append(samples[name]())
    return seen


@dataclass(frozen=True, slots=True)
class Timing:
    """A time in milliseconds.

    Attributes:
        ms: the median.
        spread: the interquartile range over it; 0 with fewer than four samples.
    """

    ms: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The timing of some samples."""
        middle = statistics.median(samples)
        if len(samples) < 4 or middle <= 0:
            return cls(middle, 0.0)
        low, _, high = statistics.quantiles(samples, n=4)
        return cls(middle, (high - low) / middle)

    @classmethod
    def difference(cls, both: Sequence[float], first: Sequence[float]) -> Timing:
        """The timing of what remains of samples without others that were taken in the same rounds."""
        return cls.of([a - b for a, b in zip(both, first, strict=True)])


def host_us(call: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds that the host takes to enqueue a call; few enough calls that the launch queue does not fill."""
    for _ in range(3):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - start
    synchronize()
    return took / calls * 1e6
