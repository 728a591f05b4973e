"""The worker: a process of its own in which candidates run, so that one that aborts, hangs or faults fails alone.

Messages are JSON over a pipe; nothing is unpickled, and the worker builds its own catalogue from a name. It is started
as ``python -c``, not through ``multiprocessing``, which would run the caller's main module again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from liger_registry.errors import MeasurementError, RegistryError
from liger_registry.problem import Problem
from liger_registry.tuning.bench import Bench, resolve
from liger_registry.tuning.candidates import Candidate
from liger_registry.tuning.outcome import Outcome, failure

if TYPE_CHECKING:
    from liger_registry.device import Device

CATALOG = "liger_registry.runtime:build_catalog"
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from liger_registry.tuning.worker import main; main()"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the worker may be silent, in seconds.

    Attributes:
        start_s: until it has imported everything.
        compile_s: where it may compile: on a GPU, in each case of verification; and for each candidate compiled ahead.
        candidate_s: in each case of verification on a CPU, and while one candidate is timed.
    """

    start_s: float = 120.0
    compile_s: float = 120.0
    candidate_s: float = 30.0


DEFAULT_LIMITS = Limits()


class Worker:
    """Takes candidates through the steps in a process of its own, which is started when it is first needed.

    Args:
        device: the device that decisions are for.
        torch_device: where tensors lie.
        catalog_source: ``module:function`` that builds the catalogue.
        clock_source: ``module:function`` in place of the wall clock; for tests.
        limits: how long it may be silent.
    """

    def __init__(
        self,
        device: Device,
        torch_device: str,
        catalog_source: str = CATALOG,
        clock_source: str = "",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._device = device
        self._torch_device = torch_device
        self._sources = catalog_source, clock_source
        self._limits = limits
        self._gpu = torch_device.startswith("cuda")
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._output: Any = None
        self.starts = 0

    # -- the steps -------------------------------------------------------------------------------------------------

    def describe(self) -> Mapping[str, str]:
        """Versions and clocks, for provenance."""
        answer = self._ask({"do": "describe"}, self._limits.candidate_s)
        return dict(answer) if isinstance(answer, Mapping) else {}

    def compile(self, problem: Problem, candidates: Sequence[Candidate], full: bool = True) -> list[Outcome]:
        """Compile ahead what ``verify`` and ``measure`` run; not ok is what does not compile or fit."""
        return self._step("compile", problem, candidates, self._limits.compile_s * max(1, len(candidates)), full=full)

    def probe(self, problem: Problem, candidate: Candidate) -> Outcome:
        """About how long one call takes."""
        return self._step("probe", problem, [candidate], self._limits.candidate_s)[0]

    def verify(self, problem: Problem, candidate: Candidate, full: bool = True) -> Outcome:
        """Hold a candidate against the reference, with tensors of every layout or with contiguous ones alone."""
        limit = self._limits.compile_s if self._gpu else self._limits.candidate_s
        return self._step("verify", problem, [candidate], limit, full=full)[0]

    def verify_whole(self, problem: Problem, candidate: Candidate) -> Outcome:
        """Hold one call at the problem's own sizes against the reference."""
        return self._step("verify_whole", problem, [candidate], self._limits.candidate_s)[0]

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], budget_us: float, stop_us: float = math.inf
    ) -> list[Outcome]:
        """Time candidates in turn; a failure fails the one that was starting, and the others are not timed."""
        limit = self._limits.candidate_s
        return self._step("measure", problem, candidates, limit, budget_us=budget_us, stop_us=stop_us)

    def close(self, kill: bool = False) -> None:
        """End the process; ``kill`` does not wait for what it is at."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()  # an idle worker reads the end of its input, and goes
        if process is not None:
            if kill:
                process.kill()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    # -- the pipe --------------------------------------------------------------------------------------------------

    def _step(
        self, do: str, problem: Problem, candidates: Sequence[Candidate], limit_s: float, **more: float
    ) -> list[Outcome]:
        request = {
            "do": do,
            "op": problem.op,
            "problem": problem.to_json(),
            "candidates": [[c.implementation.id, dict(c.config)] for c in candidates],
            **more,
        }
        at = [0]
        answer = self._ask(request, limit_s, at)
        if isinstance(answer, Outcome):
            return [answer if n == at[0] else Outcome("", "not timed") for n in range(len(candidates))]
        outcomes = [Outcome(**fields) for fields in answer]
        if any(outcome.poisoned for outcome in outcomes):
            self.close(kill=True)
        return outcomes

    def _ask(self, request: Mapping[str, Any], limit_s: float, at: list[int] | None = None) -> Any:  # noqa: ANN401
        """The answer to a request, or the Outcome that the worker's end means; ``at`` follows which candidate runs."""
        try:
            pipe = self._started()
            pipe.send_bytes(json.dumps(request).encode())
            # Every sign of life starts the limit anew: it is a limit for one candidate, not for all of them.
            while pipe.poll(limit_s):
                message = json.loads(pipe.recv_bytes())
                if "at" not in message:
                    return message["answer"]
                if at is not None:
                    at[0] = message["at"]
        except (EOFError, OSError):
            return self._died()
        self.close(kill=True)
        return Outcome("timeout", f"not done after {limit_s:g} s", poisoned=True)

    def _died(self) -> Outcome:
        code, tail = None, ""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(10)
        if self._output is not None:
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - 2000))
            lines = self._output.read().decode(errors="replace").split("\n")
            tail = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.close(kill=True)
        ended = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return Outcome("crash", f"the worker ended {ended}{': ' + tail[:300] if tail else ''}", poisoned=True)

    def _started(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        ours, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process that writes to it
        setup = {
            "pipe": theirs.fileno(),
            "parent": os.getpid(),
            "device": self._device.to_json(),
            "torch_device": self._torch_device,
            "catalog": self._sources[0],
            "clock": self._sources[1],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(setup)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            # Triton reads it when it is imported, so it must be there from the start.
            env={**os.environ, "TRITON_INTERPRET": "1"} if self._device.vendor == "interpreter" else None,
        )
        theirs.close()
        self._pipe = ours
        self.starts += 1
        answer: Any = None
        with contextlib.suppress(EOFError, OSError):
            if ours.poll(self._limits.start_s):
                answer = json.loads(ours.recv_bytes())
        if answer != {"answer": "ready"}:
            # No candidate is to blame, and the next start would fail alike.
            why = answer["answer"] if answer is not None else self._died().detail
            self.close(kill=True)
            raise MeasurementError(
                "the process that measures candidates does not start",
                why=why,
                fix="`liger-tune doctor` shows what is installed, and what fails to load",
            )
        return ours


def load(source: str) -> Callable[[], Any]:
    """The function that ``module:function`` names."""
    module, _, name = source.partition(":")
    function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    return function


def main() -> None:
    """The worker's own side; arguments are sys.path, which is set by now, and the setup, both JSON."""
    from liger_registry.device import Device

    setup = json.loads(sys.argv[2])
    threading.Thread(target=_outlive, args=(setup["parent"],), daemon=True).start()
    pipe = Connection(setup["pipe"])

    def send(message: Mapping[str, Any]) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    try:
        catalog, clock = load(setup["catalog"])(), load(setup["clock"]) if setup["clock"] else None
        bench = Bench(catalog, Device.from_json(setup["device"]), setup["torch_device"], clock)
    except Exception as error:
        send({"answer": f"{type(error).__name__}: {error}"})
        return
    bench.starting = lambda index: send({"at": index})
    send({"answer": "ready"})
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            bench.close()
            return
        send({"answer": _serve(bench, request)})


def _serve(bench: Bench, request: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if request["do"] == "describe":
        return dict(bench.describe())
    try:
        problem = Problem.from_json(request["op"], request["problem"])
        candidates = [resolve(bench.catalog, problem, name, config) for name, config in request["candidates"]]
    except RegistryError as error:
        # What was registered in the parent process alone cannot be found by name here.
        return [failure(error).to_json() for _ in request["candidates"]]
    if request["do"] == "measure":
        outcomes = bench.measure(problem, candidates, request["budget_us"], request["stop_us"])
    elif request["do"] == "compile":
        outcomes = bench.compile(problem, candidates, request["full"])
    elif request["do"] == "verify":
        outcomes = [bench.verify(problem, candidates[0], request["full"])]
    elif request["do"] == "verify_whole":
        outcomes = [bench.verify_whole(problem, candidates[0])]
    else:
        outcomes = [bench.probe(problem, candidates[0])]
    return [outcome.to_json() for outcome in outcomes]


def _outlive(parent: int) -> None:
    """Ends this process when its parent is gone, whatever it is at."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
