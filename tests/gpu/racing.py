"""Races, planted as implementations of ``layer_norm``'s backward: all is right but the gradient of the bias, a sum over
rows by several programs that do not wait for each other as they should.

Where programs run one after the other, as in Triton's interpreter, every one of these is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from liger_registry import registry
from liger_registry.config import Fields
from liger_registry.implementation import Implementation
from liger_registry.problem import BACKWARD, Problem
from liger_registry.reference import reference_implementation

PROGRAMS, HIDDEN = 64, 512
OP = registry.op("layer_norm")
PROBLEM = Problem(
    OP.name,
    "default",
    BACKWARD,
    Fields(rows=4096, hidden=HIDDEN),
    Fields(x="float32", weight="float32", bias="float32"),
    Fields(needs="x,weight,bias"),
)
Sum = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def _own(X, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over this program's rows."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, PROGRAMS):
        total += tl.load(X + row * N + column, mask=column < N, other=0.0)
    return total


@triton.jit
def _gathered(PARTIALS, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """The sum of what all programs have written."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for program in range(PROGRAMS):
        total += tl.load(PARTIALS + program * N + column, mask=column < N, other=0.0, cache_modifier=CACHE)
    return total


@triton.jit
def store_partials(X, PARTIALS, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    own = _own(X, rows, N, PROGRAMS, BLOCK)
    tl.store(PARTIALS + tl.program_id(0) * N + column, own, mask=column < N)


@triton.jit
def last_gathers(X, PARTIALS, COUNTER, OUT, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Right, if its counter is its own: the last program to arrive adds up what all have written, and sets it back."""
    column = tl.arange(0, BLOCK)
    own = _own(X, rows, N, PROGRAMS, BLOCK)
    tl.store(PARTIALS + tl.program_id(0) * N + column, own, mask=column < N)
    tl.debug_barrier()  # all of this program's threads have written before one of them counts it
    if tl.atomic_add(COUNTER, 1) == PROGRAMS - 1:
        tl.store(OUT + column, _gathered(PARTIALS, N, PROGRAMS, BLOCK, ".cg"), mask=column < N)
        tl.store(COUNTER, 0)


@triton.jit
def counts_first(X, PARTIALS, COUNTER, OUT, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts itself before it has written: the last to count reads what others are still at."""
    column = tl.arange(0, BLOCK)
    last = tl.atomic_add(COUNTER, 1) == PROGRAMS - 1
    others = tl.zeros([BLOCK], tl.float32)
    if last:
        others = _gathered(PARTIALS, N, PROGRAMS - 1, BLOCK, ".cg")
    own = _own(X, rows, N, PROGRAMS, BLOCK)
    tl.store(PARTIALS + tl.program_id(0) * N + column, own, mask=column < N)
    if last:
        tl.store(OUT + column, others + own, mask=column < N)


@triton.jit
def reads_stale(X, PARTIALS, COUNTER, OUT, SPARE, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Looks at what is there before it counts itself, and nothing makes the second look see more than the first."""
    column = tl.arange(0, BLOCK)
    early = _gathered(PARTIALS, N, PROGRAMS, BLOCK, "")
    tl.store(SPARE + tl.program_id(0) * N + column, early, mask=column < N)
    own = _own(X, rows, N, PROGRAMS, BLOCK)
    tl.store(PARTIALS + tl.program_id(0) * N + column, own, mask=column < N)
    if tl.atomic_add(COUNTER, 1, sem="relaxed") == PROGRAMS - 1:
        tl.store(OUT + column, _gathered(PARTIALS, N, PROGRAMS, BLOCK, ""), mask=column < N)


@triton.jit
def adds_unlocked(X, OUT, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Reads, adds and writes back: what another program added in between is lost."""
    column = tl.arange(0, BLOCK)
    own = _own(X, rows, N, PROGRAMS, BLOCK)
    before = tl.load(OUT + column, mask=column < N, other=0.0)
    tl.store(OUT + column, before + own, mask=column < N)


@triton.jit
def adds_in_any_order(X, OUT, rows, N: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.atomic_add(OUT + column, _own(X, rows, N, PROGRAMS, BLOCK), mask=column < N)


def _sizes(x: torch.Tensor) -> dict[str, int]:
    return {"N": x.shape[1], "PROGRAMS": PROGRAMS, "BLOCK": triton.next_power_of_2(x.shape[1])}


def _partials(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((PROGRAMS, x.shape[1]), dtype=torch.float32, device=x.device)


def _by_last(kernel, x: torch.Tensor, counter: torch.Tensor, *spare: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    kernel[(PROGRAMS,)](x, _partials(x), counter, out, *spare, x.shape[0], **_sizes(x))
    return out


def _counter(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _kept_counter(device: torch.device) -> torch.Tensor:
    return _counter(device)


@functools.cache
def _kept_partials(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


# -- right ---------------------------------------------------------------------------------------------------------


def two_launches(x: torch.Tensor) -> torch.Tensor:
    partials = _partials(x)
    store_partials[(PROGRAMS,)](x, partials, x.shape[0], **_sizes(x))
    return partials.sum(0)


def last_block(x: torch.Tensor) -> torch.Tensor:
    return _by_last(last_gathers, x, _counter(x.device))


RIGHT = (two_launches, last_block)

# -- races between programs ------------------------------------------------------------------------------------------


def counted_before_written(x: torch.Tensor) -> torch.Tensor:
    return _by_last(counts_first, x, _counter(x.device))


def no_fence(x: torch.Tensor) -> torch.Tensor:
    return _by_last(reads_stale, x, _counter(x.device), _partials(x))


def lost_updates(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    adds_unlocked[(PROGRAMS,)](x, out, x.shape[0], **_sizes(x))
    return out


def order_of_arrival(x: torch.Tensor) -> torch.Tensor:
    """Each sum is right, and no two have the same bits, though they are declared to."""
    out = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    adds_in_any_order[(PROGRAMS,)](x, out, x.shape[0], **_sizes(x))
    return out


BETWEEN_PROGRAMS = (counted_before_written, no_fence, lost_updates, order_of_arrival)

# -- races between streams ---------------------------------------------------------------------------------------------


def kept_counter(x: torch.Tensor) -> torch.Tensor:
    """The counter is set back by the last program, and another stream's call counts with it."""
    return _by_last(last_gathers, x, _kept_counter(x.device))


def kept_scratch(x: torch.Tensor) -> torch.Tensor:
    """Scratch of a shape is kept, and another stream's call writes into it."""
    partials = _kept_partials((PROGRAMS, x.shape[1]), x.device)
    store_partials[(PROGRAMS,)](x, partials, x.shape[0], **_sizes(x))
    return partials.sum(0)


def own_stream(x: torch.Tensor) -> torch.Tensor:
    """Runs on a stream of its own, which waits for nothing."""
    out = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    with torch.cuda.stream(_side(x.device)):
        out.copy_(x.sum(0))
    return out


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


BETWEEN_STREAMS = (kept_counter, kept_scratch, own_stream)


def planted(sum_of_rows: Sum) -> Implementation:
    """An implementation whose gradient of the bias is computed by a function of the rows of the upstream gradient."""
    right = reference_implementation(OP, PROBLEM).launch
    place = OP.differentiable.index("bias")

    def launch(*tensors, **rest):
        results = list(right(*tensors, **rest))
        gradient = tensors[0]
        if results[place] is not None:
            rows = gradient.reshape(-1, gradient.shape[-1]).contiguous().float()
            results[place] = sum_of_rows(rows).to(results[place].dtype)
        return tuple(results)

    name = sum_of_rows.__name__
    return Implementation(OP.name, BACKWARD, name, launch, deterministic=True, distribution="planted")
