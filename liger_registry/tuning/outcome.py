"""What becomes of a candidate in one step of tuning, and who takes it through the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from liger_registry.errors import CompileError
from liger_registry.foreign import told
from liger_registry.problem import Problem
from liger_registry.tuning.candidates import Candidate

_GPU_FAULTS = ("CUDA error", "HIP error", "illegal memory access", "misaligned address", "device-side assert")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one candidate in one step.

    Attributes:
        status: that of a sample, such as ``ok`` or ``wrong``; empty for a candidate whose turn did not come.
        detail: why it failed, in one line.
        time_us: the interquartile mean in microseconds.
        noise: its relative uncertainty.
        drift: the anchor's relative change during the block.
        extra_bytes: the peak of memory beyond the results, in bytes.
        poisoned: the process can no longer be trusted.
        foreign: other processes use the device.
    """

    status: str
    detail: str = ""
    time_us: float | None = None
    noise: float = 0.0
    drift: float = 0.0
    extra_bytes: int | None = None
    poisoned: bool = False
    foreign: bool = False

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain JSON values."""
        return asdict(self)


class Runner(Protocol):
    """What takes candidates through the steps: the bench itself, or the worker that holds one."""

    def describe(self) -> Mapping[str, str]:
        """Versions and clocks, for provenance."""

    def compile(self, problem: Problem, candidates: Sequence[Candidate], full: bool = True) -> list[Outcome]:
        """Compile ahead what ``verify`` and ``measure`` run; not ok is what does not compile or fit."""

    def probe(self, problem: Problem, candidate: Candidate) -> Outcome:
        """About how long one call takes."""

    def verify(self, problem: Problem, candidate: Candidate, full: bool = True) -> Outcome:
        """Hold a candidate against the reference, with tensors of every layout or with contiguous ones alone."""

    def verify_whole(self, problem: Problem, candidate: Candidate) -> Outcome:
        """Hold one call at the problem's own sizes against the reference."""

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], budget_us: float, stop_us: float = math.inf
    ) -> list[Outcome]:
        """Time candidates in turn; one that takes longer than ``stop_us`` gets a few samples only."""

    def close(self) -> None:
        """Let go of everything."""


def failure(error: BaseException) -> Outcome:
    """The outcome that an exception means."""
    text = told(error).strip()
    line = " ".join(text.split())[:500]
    name, module = type(error).__name__, type(error).__module__
    if any(sign in text for sign in _GPU_FAULTS) and "out of memory" not in text:
        return Outcome("crash", line, poisoned=True)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in text or "can't allocate" in text:
        return Outcome("memory", line)
    if name == "OutOfResources":
        return Outcome("resources", line)
    if isinstance(error, CompileError) or module.startswith("triton"):
        return Outcome("compile", line)
    return Outcome("error", line)
