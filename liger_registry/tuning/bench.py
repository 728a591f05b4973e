"""The bench: compiles, verifies and times candidates in its own process; what goes wrong becomes a status."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from liger_registry.compile import fits, target_of
from liger_registry.compile_pool import CompilePool
from liger_registry.errors import CompileError
from liger_registry.examples import STYLES
from liger_registry.launch import record, triton_available
from liger_registry.op import DimKind
from liger_registry.problem import Problem
from liger_registry.table import OK, WRONG, Choice
from liger_registry.tuning.arguments import META, Arguments
from liger_registry.tuning.candidates import Candidate
from liger_registry.tuning.case_cache import CaseCache
from liger_registry.tuning.cases import CONTIGUOUS, Recipe, recipes
from liger_registry.tuning.measure import CPU_CALL_S, CpuTimer, CudaTimer, Timer, extra_bytes, measure
from liger_registry.tuning.outcome import Outcome, failure
from liger_registry.tuning.verify import Verification, proxies_for, verify, walk_for
from liger_registry.tuning.whole import References, verify_whole

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.config import Fields
    from liger_registry.device import Device

# Seconds between two looks at which other processes use the device.
_LOOK_S = 5.0


class Bench:
    """Runs candidates in this process.

    Args:
        catalog: where operations are looked up.
        device: the device that decisions are for.
        torch_device: where tensors lie.
        clock: seconds, in place of the wall clock; CPU only.
        processes: compile this many kernels at a time; None takes the number of usable cores, 32 at most.
    """

    def __init__(
        self,
        catalog: Catalog,
        device: Device,
        torch_device: torch.device | str,
        clock: Callable[[], float] | None = None,
        processes: int | None = None,
    ) -> None:
        self.catalog = catalog
        self.device = device
        self.torch_device = torch.device(torch_device)
        self.processes = processes or min(32, _cores())
        self.starting: Callable[[int], None] = lambda index: None
        self._clock = clock
        self._timer: Timer | None = None
        self._cases = CaseCache()
        self._pool = CompilePool(self.processes)
        self._extra: dict[Choice, int | None] = {}
        self._references = References()
        self._tensors: tuple[Problem, Arguments] | None = None
        self._looked, self._seen = -math.inf, False

    def describe(self) -> Mapping[str, str]:
        """Torch's version and, where ``nvidia-smi`` tells them, the driver's and the highest clocks."""
        found = {"torch": torch.__version__, "driver": "", "clocks": ""}
        line = _nvidia_smi(self.torch_device, "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem")
        if line:
            driver, _, clocks = line[0].partition(",")
            found.update(driver=driver.strip(), clocks=f"max {' '.join(clocks.split())}")
        return found

    def compile(self, problem: Problem, candidates: Sequence[Candidate], full: bool = True) -> list[Outcome]:
        """Compile what each candidate launches, at the problem's sizes and in verification, in a pool of processes."""
        if self.torch_device.type != "cuda" or not triton_available():
            return [Outcome(OK) for _ in candidates]
        wanted: list[Any] = []
        spans: list[Any] = []
        for index, candidate in enumerate(candidates):
            self.starting(index)
            try:
                kinds = self._recipes(problem, candidate, full)
                records = [r for recipe in kinds for r in self._record(recipe, candidate)]
            except Exception as error:
                spans.append(failure(error))
                continue
            spans.append(range(len(wanted), len(wanted) + len(records)))
            wanted += records
        compiled = self._pool.compile(wanted, target_of(self.device)) if wanted else []
        return [span if isinstance(span, Outcome) else self._fit([compiled[n] for n in span]) for span in spans]

    def _recipes(self, problem: Problem, candidate: Candidate, full: bool) -> list[Recipe]:
        """The problem itself and the cases of its verification, each kind of tensors once."""
        op = self.catalog.op(problem.op)
        proxies = proxies_for(op, candidate.implementation, candidate.config, problem, self.device)
        walk = walk_for(op, candidate.implementation, candidate.config, problem, self.device, proxies)
        cases = [Recipe(problem, "random", 0, CONTIGUOUS), *recipes(op, problem, proxies, STYLES, 0, full, walk)]
        return list({(r.problem, r.layouts, r.options, r.units): r for r in cases}.values())

    def _record(self, recipe: Recipe, candidate: Candidate) -> list[Any]:
        tensors = Arguments.of(self.catalog.op(recipe.problem.op), recipe.problem, META, recipe.layouts).tensors
        with torch.no_grad(), record() as records:
            self._bound(recipe.problem, candidate, recipe.options, recipe.units)(*tensors)
        return list(records)

    def _fit(self, found: Sequence[Any]) -> Outcome:
        for compiled in found:
            if isinstance(compiled, CompileError):
                status = (
                    "resources" if "OutOfResources" in compiled.why or "out of resource" in compiled.why else "compile"
                )
                return Outcome(status, " ".join(str(compiled).split())[:500])
            if (reason := fits(compiled, self.device)) is not None:
                return Outcome("resources", reason)
        return Outcome(OK)

    def verify(self, problem: Problem, candidate: Candidate, full: bool = True) -> Outcome:
        """Hold a candidate against the reference, with tensors of every layout or with contiguous ones alone."""
        op = self.catalog.op(problem.op)
        with self._caught() as caught:
            implementation, config = candidate.implementation, candidate.config
            found = verify(
                op,
                implementation,
                config,
                problem,
                self.device,
                self.torch_device,
                cache=self._cases,
                full=full,
                starting=lambda case: self.starting(0),
            )
            caught.append(_outcome(found))
        return caught[0]

    def verify_whole(self, problem: Problem, candidate: Candidate) -> Outcome:
        """Hold one call at the problem's own sizes against the reference."""
        op, implementation, config = self.catalog.op(problem.op), candidate.implementation, candidate.config
        with self._caught() as caught:
            self.starting(0)
            arguments = self._arguments(problem)
            found = verify_whole(
                op,
                implementation,
                config,
                problem,
                self.device,
                arguments,
                self._references,
                starting=lambda chunk: self.starting(0),
            )
            caught.append(_outcome(found))
        return caught[0]

    def probe(self, problem: Problem, candidate: Candidate) -> Outcome:
        """About how long one call takes, from calls of growing size that end as soon as the answer is clear."""
        op = self.catalog.op(problem.op)
        buckets = {n: int(problem.dims[n]) for n, kind in op.dims.items() if kind is DimKind.BUCKET}  # type: ignore[arg-type]
        largest = max(buckets.values(), default=1)
        size = min(256, largest)
        with self._caught() as caught:
            while True:
                small = problem.having(**{n: max(1, n_rows * size // largest) for n, n_rows in buckets.items()})
                call = self._call(small, candidate)
                call()
                seconds = self._the_timer().time(call) * 1e-6 * (largest / size)
                if size == largest or seconds > 4 * CPU_CALL_S:
                    caught.append(Outcome(OK, time_us=seconds * 1e6))
                    break
                size = min(8 * size, largest)
        self._forget()
        return caught[0]

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], budget_us: float, stop_us: float = math.inf
    ) -> list[Outcome]:
        """Time candidates in turn; a failure fails the one that was starting, and the others are not timed."""
        current = [0]

        def starting(index: int) -> None:
            current[0] = index
            self.starting(index)

        with self._caught() as caught:
            calls = []
            extras = []
            for index, candidate in enumerate(candidates):
                starting(index)
                calls.append(self._call(problem, candidate))
                if candidate.choice not in self._extra:
                    calls[-1]()
                    self._extra[candidate.choice] = extra_bytes(calls[-1], self.torch_device)
                extras.append(self._extra[candidate.choice])
            with torch.no_grad():
                block = measure(calls, self._the_timer(), budget_us, stop_us=stop_us, starting=starting)
            foreign = self._foreign()
            caught += [
                Outcome(OK, "", t.time_us, t.noise, block.drift, extra, foreign=foreign)
                for t, extra in zip(block.timings, extras, strict=True)
            ]
        if len(caught) == len(candidates) and caught[0].status == OK:
            return caught
        return [caught[0] if n == current[0] else Outcome("", "not timed") for n in range(len(candidates))]

    def close(self) -> None:
        """Let go of tensors, cases and the timer's buffers."""
        self._cases.clear()
        self._timer = None
        self._forget()
        self._pool.close()

    @contextlib.contextmanager
    def _caught(self) -> Iterator[list[Outcome]]:
        """Turns an exception into the outcome it means; a list that already has outcomes is emptied first."""
        outcomes: list[Outcome] = []
        try:
            yield outcomes
        except Exception as error:
            outcomes[:] = [failure(error)]
            # The traceback holds the frames, and these the tensors.
            error.__traceback__ = None
        if outcomes[0].status == "memory":
            self._cases.clear()
            self._forget()

    def _forget(self) -> None:
        self._tensors = None
        self._references.clear()
        self._extra.clear()
        if self.torch_device.type == "cuda":
            gc.collect()
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _foreign(self) -> bool:
        # nvidia-smi takes longer than a candidate does.
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked, self._seen = now, foreign_processes(self.torch_device)
        return self._seen

    def _the_timer(self) -> Timer:
        if self._timer is None:
            if self.torch_device.type == "cuda":
                self._timer = CudaTimer(self.torch_device, self.device.limits.l2_bytes)
            else:
                self._timer = CpuTimer() if self._clock is None else CpuTimer(self._clock)
        return self._timer

    def _bound(
        self, problem: Problem, candidate: Candidate, options: Fields | None = None, units: int = 0
    ) -> Callable[..., tuple[Any, ...]]:
        op = self.catalog.op(problem.op)
        needs = op.needs_of(problem)
        device = replace(self.device, units=min(self.device.units, units)) if units else self.device
        options = options or op.options_of(problem)  # type: ignore[assignment]
        return candidate.implementation.bind(candidate.config, device, options, needs, problem)  # type: ignore[arg-type]

    def _call(self, problem: Problem, candidate: Candidate) -> Callable[[], Any]:
        apart = self._arguments(problem).apart(self.catalog.op(problem.op), problem)
        bound, tensors = self._bound(problem, candidate), apart.tensors

        def call() -> Any:  # noqa: ANN401
            with torch.no_grad():
                return bound(*tensors)

        return call

    def _arguments(self, problem: Problem) -> Arguments:
        """Tensors of the problem's sizes, which are kept until another problem's are wanted."""
        if self._tensors is None or self._tensors[0] != problem:
            self._forget()
            self._tensors = problem, Arguments.of(self.catalog.op(problem.op), problem, self.torch_device)
        return self._tensors[1]


def _outcome(found: Verification) -> Outcome:
    return Outcome(OK) if found.passed else Outcome(WRONG, found.detail[:500])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def foreign_processes(torch_device: torch.device) -> bool:
    """Whether processes other than this one and its parent compute on a GPU; False where nobody can tell."""
    lines = _nvidia_smi(torch_device, "--query-compute-apps=pid")
    pids = {int(line) for line in lines if line.strip().isdigit()}
    # In a container the tool names other numbers, or none: only a list that has this process can be read.
    return os.getpid() in pids and bool(pids - {os.getpid(), os.getppid()})


def _nvidia_smi(torch_device: torch.device, query: str) -> list[str]:
    if torch_device.type != "cuda" or torch.version.hip:
        return []
    try:
        uuid = str(getattr(torch.cuda.get_device_properties(torch_device), "uuid", ""))
        target = ["-i", f"GPU-{uuid}"] if uuid else []
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader", *target],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def resolve(catalog: Catalog, problem: Problem, implementation: str, config: Mapping[str, Any]) -> Candidate:
    """The candidate that an id and config fields name.

    Raises:
        RegistryError: this catalogue does not have it.
    """
    found = catalog.find(problem.op, problem.scheme, problem.phase, implementation)
    return Candidate(found, found.space.parse(config))
