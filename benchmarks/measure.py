"""One case over all candidates: right first, then memory, then time in turn."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cases import BACKWARD, BOTH, ERROR, FORWARD, Case
from benchmarks.inputs import Call, Inputs, backward, error, formula, make, outputs_of, relative_error
from benchmarks.memory import extra_gib, storage_bytes
from benchmarks.peers import STATES, Peer
from benchmarks.timing import Clock, Sample, Sweep, Timing, host_us, in_turn

#: Rounds of what is captured, and of losses by events, which take a hundred times as long each.
ROUNDS, ROUNDS_LINEAR = 12, 7
#: Norm of the difference from PyTorch's result over the norm above which a candidate is named: ten roundings to bf16.
DIFFERS = 0.04


@dataclass(slots=True)
class Result:
    """What was measured of a case.

    Attributes:
        figures: by phase, then ``candidate.quantity``.
        spread: by phase and candidate, the interquartile range of the times over their median.
        failed: by candidate, what went wrong.
        decisions: of each state of ours what it runs.
        writes: candidates that write into their inputs; they have inputs of their own, restored before each sample.
        method: how time was taken.
        uncaptured: candidates whose calls could not be captured after all; their times are from events.
        sets: of buffers that calls go round among.
    """

    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, list[str]] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    method: str = ""
    uncaptured: list[str] = field(default_factory=list)
    sets: int = 1

    def note(self, phases: Iterable[str], name: str, value: float) -> None:
        """Keep a figure of some phases."""
        for phase in phases:
            self.figures.setdefault(phase, {})[name] = value


def short(problem: BaseException) -> str:
    """An exception in one line."""
    said = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {said[0] if said else ''}"[:300]


def step(call: Call, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Forward and backward once; the gradients."""
    return backward(outputs_of(call(*inputs.tensors)), inputs)


class Bench:
    """Measures cases on a device.

    Args:
        device: where.
        peers: the candidates that are there.
        clock: takes the times.
        rounds: samples of each candidate; None for the usual number.
        log: told of failures.
    """

    def __init__(
        self,
        device: torch.device,
        peers: Mapping[str, Peer],
        clock: Clock,
        rounds: int | None = None,
        log: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self.device, self.peers, self.clock, self.rounds, self.log = device, peers, clock, rounds, log
        # What was imported by now is never garbage; looking through it takes longer than measuring a norm.
        gc.freeze()

    def measure(self, case: Case, phases: Iterable[str]) -> Result:
        """Everything there is to say of a case in some phases."""
        wanted, result = tuple(phases), Result()
        if ERROR in wanted:
            self._errors(case, result)
            wanted = tuple(p for p in wanted if p != ERROR)
        if wanted:
            self._times(case, wanted, result)
        self.clear()
        return result

    def clear(self) -> None:
        """Give back what a case took."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fail(self, result: Result, name: str, case: Case, problem: Exception) -> None:
        result.failed[name] = short(problem)
        self.log(f"  {name} fails at {case.name}: {short(problem)}")
        self.clear()

    def _calls(self, case: Case, inputs: Inputs, result: Result) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        for name, peer in self.peers.items():
            try:
                call = peer.make(case, inputs)
            except Exception as problem:  # one that fails is reported, and the others go on
                self._fail(result, name, case, problem)
                continue
            if call is not None:
                calls[name] = call
        return calls

    # -- right, and how much memory ------------------------------------------------------------------------------------

    def _errors(self, case: Case, result: Result) -> None:
        """The error of each head's weight gradient against float64."""
        inputs = make(case, self.device)
        right = weight_gradient(inputs)
        for name, call in self._calls(case, inputs, result).items():
            try:
                result.note((ERROR,), f"{name}.weight_error", error(step(call, inputs.clone())[1], right))
            except Exception as problem:
                self._fail(result, name, case, problem)
        result.method = "against float64"

    def _check(self, case: Case, phases: tuple[str, ...], name: str, call: Call, right: Any, result: Result) -> None:
        """Whether a candidate is right, writes into its inputs, and what memory and host time it takes."""
        inputs, outputs_right, grads_right = right
        trial = inputs.clone()
        outputs = outputs_of(call(*trial.tensors))
        off = relative_error(outputs, outputs_right)
        grads = backward(outputs, trial)
        off = max(off, relative_error(grads, grads_right))
        result.note(phases, f"{name}.error", off)
        if off > DIFFERS or off != off:
            self.log(f"  {name} is off by {off:.2g} at {case.name}")
        del outputs, grads
        if not trial.equals(inputs):
            result.writes.append(name)
            trial.restore(inputs)
        result.note(phases, f"{name}.extra_gib", extra_gib(lambda: step(call, trial)))
        if case.capturable:
            held = [outputs_of(call(*trial.tensors))]
            behind = extra_gib(lambda: backward(held.pop(), trial), storage_bytes)
            result.note(phases, f"{name}.backward_extra_gib", behind)
            result.note(phases, f"{name}.host_us", host_us(lambda: call(*trial.tensors)))
        if name in STATES:
            from benchmarks.peers.ours import decisions

            result.decisions[name] = decisions(name, case, inputs)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _times(self, case: Case, phases: tuple[str, ...], result: Result) -> None:
        first = make(case, self.device)
        exact = formula(case, wide=True)
        outputs = outputs_of(exact(*first.tensors))
        right = first, tuple(o.detach() for o in outputs), backward(outputs, first)
        del outputs
        graphs = case.capturable
        result.sets = self.clock.sets(first.bytes) if graphs else 1
        result.method = ("graph" if graphs else "events") if self.clock.graphs else "wall clock"
        calls = self._calls(case, first, result)
        for name in list(calls):
            try:
                self._check(case, phases, name, calls[name], right, result)
            except Exception as problem:
                self._fail(result, name, case, problem)
                del calls[name]
        del right
        sets = [first, *(make(case, self.device, seed) for seed in range(1, result.sets))]
        samples: dict[str, Sample] = {}
        for name in list(calls):
            try:
                samples |= self._samples(case, name, calls[name], sets, result)
            except Exception as problem:
                self._fail(result, name, case, problem)
        self._keep(phases, in_turn(samples, self.rounds or (ROUNDS if graphs else ROUNDS_LINEAR)), result)

    def _samples(self, case: Case, name: str, call: Call, sets: list[Inputs], result: Result) -> dict[str, Sample]:
        writes = name in result.writes
        mine = [inputs.clone() for inputs in sets] if writes else sets

        def forward() -> object:
            return [call(*inputs.tensors) for inputs in mine]

        def both() -> object:
            outputs = [outputs_of(call(*inputs.tensors)) for inputs in mine]
            return outputs, [backward(found, inputs) for found, inputs in zip(outputs, mine, strict=True)]

        def fresh(sample: Sample) -> Sample:
            def restored() -> float:
                for target, source in zip(mine, sets, strict=True):
                    target.restore(source)
                return sample()

            return restored if writes else sample

        def sampled(sweep: Sweep) -> Sample:
            try:
                return fresh(self.clock.graph(sweep, len(mine)))
            except Exception as problem:  # such as one that waits for the device
                self.log(f"  {name} cannot be captured at {case.name}: {short(problem)}")
                result.uncaptured.append(name)
                once = fresh(self.clock.events(sweep))
                return lambda: once() / len(mine)

        if not case.capturable:
            return {f"{name} {BOTH}": fresh(self.clock.events(lambda: step(call, mine[0])))}
        # Forward first, so that the two follow each other in a round and drift takes nothing from their difference.
        return {
            f"{name} {FORWARD}": sampled(forward),
            f"{name} {BOTH}": sampled(both),
        }

    def _keep(self, phases: tuple[str, ...], seen: Mapping[str, list[float]], result: Result) -> None:
        names = [key.removesuffix(f" {BOTH}") for key in seen if key.endswith(f" {BOTH}")]
        for name in names:
            both, forward = seen[f"{name} {BOTH}"], seen.get(f"{name} {FORWARD}")
            timings = {BOTH: Timing.of(both)}
            if forward is not None:
                timings |= {FORWARD: Timing.of(forward), BACKWARD: Timing.difference(both, forward)}
            for phase in phases:
                result.note((phase,), f"{name}.ms", timings[phase].ms)
                result.spread.setdefault(phase, {})[name] = timings[phase].spread


def weight_gradient(inputs: Inputs) -> torch.Tensor:
    """The gradient of a cross-entropy's mean by the head's weight, in float64."""
    hidden, weight, target = (t.detach() for t in inputs.tensors)
    wide = hidden.double()
    share = torch.softmax(wide @ weight.double().t(), -1)
    share[torch.arange(share.shape[0], device=share.device), target] -= 1.0
    return share.t() @ wide / share.shape[0]
