"""What the soak does with a call: run it through the registry, hold its results against PyTorch, run it again beside
others, and keep count."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from drawing import Burst, Call

from liger_registry.accuracy import Verdict
from liger_registry.errors import NoImplementationError
from liger_registry.op import Op
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.tuning.layouts import bits, dirty
from liger_registry.tuning.verify import judge_result

Results = dict[str, torch.Tensor]
#: Of two streams, before they may start: both have work waiting by then, so that their kernels meet.
_CYCLES = 1_000_000
# Of what a burst may leave behind; cuBLAS keeps a workspace for each stream, and the registry its last shapes.
MOST_DEVICE_GROWTH, MOST_HOST_GROWTH = 128 << 20, 1 << 30


class DeviceLostError(Exception):
    """The device answers nothing any more: this process is of no use."""


@dataclass
class Worst:
    """The result that came nearest to a limit, or went beyond it: 1 is the limit."""

    share: float = 0.0
    what: str = ""
    where: str = ""

    def add(self, share: float, what: str, where: str) -> None:
        """Take this one if it is worse."""
        if share > self.share:
            self.share, self.what, self.where = share, what, where


@dataclass
class Count:
    """What was done with one operation.

    Attributes:
        calls, results: how many were held against PyTorch.
        forward_only: calls without a gradient.
        again, together: calls run a second time, and beside another on a second stream.
        turned_down: pins that the registry found not to be legal for a call, which then ran without them.
        resources: configs that do not fit the device, which the tuner would have found.
        shapes: how many different ones.
        implementations: how often each ran.
        norm, element: the worst of the two numbers of the accuracy rule, in units of their limits.
    """

    calls: int = 0
    results: int = 0
    forward_only: int = 0
    again: int = 0
    together: int = 0
    turned_down: int = 0
    resources: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    implementations: Counter[str] = field(default_factory=Counter)
    norm: Worst = field(default_factory=Worst)
    element: Worst = field(default_factory=Worst)

    def merge(self, other: Count) -> None:
        """Add another process's."""
        for name in ("calls", "results", "forward_only", "again", "together", "turned_down", "resources"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.shapes.update(other.shapes)
        self.implementations.update(other.implementations)
        self.norm.add(**asdict(other.norm))
        self.element.add(**asdict(other.element))

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {**asdict(self), "shapes": len(self.shapes), "implementations": dict(self.implementations)}


@dataclass
class Memory:
    """Bytes in use after each burst."""

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)

    def look(self, on_gpu: bool) -> None:
        """Measure, when nothing of a burst is held any more."""
        if on_gpu:
            torch.cuda.synchronize()
            self.device.append(torch.cuda.memory_allocated())
        self.host.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def growth(readings: Sequence[int]) -> int:
        """Between the middle of the run and its end, each the least of some readings: what once was in use is not."""
        few = max(1, len(readings) // 8)
        middle = len(readings) // 2
        return min(readings[-few:]) - min(readings[middle : middle + few]) if readings else 0

    def faults(self) -> list[str]:
        """What grew beyond all that is kept on purpose."""
        pairs = (("device", self.device, MOST_DEVICE_GROWTH), ("host", self.host, MOST_HOST_GROWTH))
        return [
            f"{name} memory grew by {grown >> 20} MiB in the second half of the run"
            for name, readings, most in pairs
            if (grown := self.growth(readings)) > most
        ]


class Soak:
    """One process's part of the soak.

    Args:
        registry: what is soaked.
        device: torch's device.
        seed: fixes all calls.
        most: elements of the largest tensor of a call.
        ops: names of operations; all by default.
    """

    def __init__(self, registry: Any, device: str, seed: int, most: int, ops: Sequence[str] = ()) -> None:
        self.registry, self.device, self.seed, self.most = registry, torch.device(device), seed, most
        self.ops: list[Op] = [op for op in registry.catalog.ops() if not ops or op.name in ops]
        self.counts: dict[str, Count] = {}
        self.failures: list[str] = []
        self.memory = Memory()
        self.on_gpu = self.device.type == "cuda"
        self.streams = [torch.cuda.Stream() for _ in range(2)] if self.on_gpu else []

    def run(self, numbers: Iterator[int], seconds: float) -> Iterator[int]:
        """Soak bursts until the time is over; yields each burst's number before it begins."""
        ended = time.monotonic() + seconds
        for number in numbers:
            if time.monotonic() > ended:
                return
            yield number
            self.burst(number)
            if number % 4 == 0:
                gc.collect()
            self.memory.look(self.on_gpu)

    def burst(self, number: int) -> None:
        """One burst; what goes wrong is in ``failures``."""
        burst = Burst(self.ops, self.seed, number, self.device, self.most)
        before: tuple[Call, Results] | None = None
        # A call's own generator: another decision about one call leaves those of the next as they are.
        for call in burst.calls(self.pin):
            try:
                found = self.call(call)
                if found is not None and not call.overwritten:
                    self.again(call, found, before)
                    before = call, found
            except DeviceLostError:
                raise
            except Exception as error:
                self.fail(call, "".join(traceback.format_exception(error))[-1500:])
                if self.on_gpu:
                    self.alive(error)

    def alive(self, error: Exception) -> None:
        """Raise DeviceLostError if the device went with an error."""
        try:
            torch.cuda.synchronize()
            torch.ones(8, device=self.device).sum().item()
        except Exception:
            raise DeviceLostError(str(error)) from error

    def fail(self, call: Call, why: str) -> None:
        """Keep what is wrong with a call, and how to see it again."""
        self.failures.append(f"{call}: {why}\n    again: {self.line(call.burst)}")

    def line(self, number: int) -> str:
        """The command that runs a burst again."""
        return f"python -m tests.gpu.soak --seed {self.seed} --most {self.most} --burst {number}"

    # -- one call --------------------------------------------------------------------------------------------------

    def pin(self, burst: Burst, call: Call) -> None:
        """Have two of three bursts ask for implementations by name, half of them with a config of their space."""
        if not burst.choice("pins").random() < 2 / 3:
            return
        for phase in (FORWARD, BACKWARD) if any(call.needs) else (FORWARD,):
            problem, budget, device = self.problem(call, phase)
            legal = [
                (item, config)
                for item in self.registry.catalog.implementations(call.op.name)
                if (item.scheme, item.phase) == (problem.scheme, phase) and item.proven
                for config in [item.propose(problem, device)]
                if not isinstance(config, str) and item.why_illegal(config, problem, device, budget) is None
            ]
            if not legal:
                continue
            # The same draws for all calls of a burst, which then share a compiled kernel.
            rng = burst.choice(phase)
            kernels = [pair for pair in legal if pair[0].capability.vendor != "any"] or legal
            item, config = rng.choice(kernels if rng.random() < 0.8 else legal)
            configs = [c for c in item.configs(problem, device) if not item.why_illegal(c, problem, device, budget)]
            call.pins[phase] = item, rng.choice(configs) if configs and rng.random() < 0.5 else config

    def problem(self, call: Call, phase: str) -> tuple[Any, int | None, Any]:
        """The problem of a call's phase in its scheme, its budget and device, as the registry sees them."""
        inputs, options = call.case.inputs, call.case.options
        scheme = self.registry.scheme_of(call.op, inputs, options, call.needs)
        problem, budget = self.registry.problem_of(call.op, inputs, options, phase, call.needs, None, scheme)
        return problem, budget, self.registry.device_of(inputs)

    def call(self, call: Call) -> Results | None:
        """Run a call and judge it; None if it did not take place."""
        count = self.counts.setdefault(call.op.name, Count())
        kept = [t.clone() for t in call.overwritten]
        before = [bits(buffer).clone() for buffer in call.case.buffers]
        try:
            found = self.results(call)
        except NoImplementationError:
            if not call.pins:
                raise
            count.turned_down += 1
            call.pins.clear()
            found = self.results(call)
        except Exception as error:
            if not (call.pins and type(error).__name__ == "OutOfResources"):
                raise
            count.resources += 1
            return None
        if kept:  # a gradient may lie where the input was
            found = {name: result.clone() for name, result in found.items()}
        for view, values in zip(call.overwritten, kept, strict=True):
            view.copy_(values)
        changed = [n for n, b in enumerate(before) if not torch.equal(b, bits(call.case.buffers[n]))]
        if changed:
            self.fail(call, "it wrote into its inputs or gradients, or beside them")
        self.count(call, count)
        for name, result in found.items():
            self.judged(call, count, judge_result(call.op, call.case, name, result), name)
        return found

    def count(self, call: Call, count: Count) -> None:
        """Count a call that took place."""
        count.calls += 1
        count.forward_only += not any(call.needs)
        count.shapes[call.case.problem.dims.text] += 1
        with self.pinned(call):
            for phase in (FORWARD, BACKWARD) if any(call.needs) else (FORWARD,):
                decision, _ = self.registry.choose(call.op, call.case.inputs, call.case.options, phase, call.needs)
                count.implementations[f"{phase} {decision.implementation.id}"] += 1

    def judged(self, call: Call, count: Count, verdict: Verdict, name: str) -> None:
        """Count a verdict."""
        count.results += 1
        where = f"{call}; {self.line(call.burst)}"
        if not verdict.problem and verdict.error_limit > 0:
            count.norm.add(verdict.error / verdict.error_limit, name, where)
            count.element.add(verdict.worst / max(verdict.worst_limit, 1e-300), name, where)
        if not verdict.passed:
            self.fail(call, str(verdict))

    def pinned(self, call: Call) -> contextlib.ExitStack:
        """Within it the registry takes the call's pins."""
        stack = contextlib.ExitStack()
        for phase, (item, config) in call.pins.items():
            stack.enter_context(self.registry.use(call.op.name, {phase: item.id}, config or None))
        return stack

    def results(self, call: Call) -> Results:
        """Outputs and gradients of a call, by name, with scratch that is not zero by luck."""
        op, case = call.op, call.case
        needed = dict(zip(op.differentiable, call.needs, strict=True))
        pairs = zip(op.inputs, case.inputs, strict=True)
        inputs = [x if x is None else x.detach().requires_grad_(needed.get(i.name, False)) for i, x in pairs]
        sizes = sorted({t.numel() * size for t in case.formula.values() for size in (t.element_size(), 4)})
        fences = dirty(self.device, sizes, huge=call.number % 2 == 1)
        with self.pinned(call), torch.set_grad_enabled(any(call.needs)):
            outputs = self.registry.get(op.name)(*inputs, **case.options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        there = dict(zip(op.outputs_of(case.options), outputs, strict=True))
        found = {name: y.detach() for name, y in there.items()}
        gradients = dict(zip(op.outputs, case.grad_outputs, strict=True))
        roots = [(y, gradients[n]) for n, y in there.items() if y.requires_grad and gradients[n] is not None]
        leaves = {i.name: x for i, x in zip(op.inputs, inputs, strict=True) if x is not None and x.requires_grad}
        if roots and leaves:
            ys, gs = zip(*roots, strict=True)
            grads = torch.autograd.grad(ys, tuple(leaves.values()), gs, allow_unused=True, materialize_grads=True)
            found |= {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
        del fences
        return found

    # -- and again -------------------------------------------------------------------------------------------------

    def again(self, call: Call, found: Results, before: tuple[Call, Results] | None) -> None:
        """Run a call again, every third time beside the burst's last one on two streams: all bits are the same."""
        count = self.counts[call.op.name]
        if call.number % 3 == 1:
            count.again += 1
            self.compare(call, found, self.results(call), "a second run gives other bits")
        if call.number % 3 == 2 and before is not None and self.streams:
            count.together += 1
            self.together([(call, found), before])

    def together(self, pairs: list[tuple[Call, Results]]) -> None:
        """Run two calls at the same time, some times each."""
        here = torch.cuda.current_stream()
        seen: list[tuple[Call, Results, Results]] = []
        for stream in self.streams:
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_CYCLES)
        for _ in range(3):
            for stream, (call, found) in zip(self.streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    seen.append((call, found, self.results(call)))
        torch.cuda.synchronize()
        for call, found, other in seen:
            self.compare(call, found, other, "beside another stream it gives other bits")

    def compare(self, call: Call, found: Results, other: Results, fault: str) -> None:
        """Fail a call whose results differ from before."""
        different = [n for n, result in found.items() if not torch.equal(bits(result), bits(other[n]))]
        if different:
            self.fail(call, f"{', '.join(different)}: {fault}")
