"""Verification: a candidate's results against the reference in float64, where faults have nowhere to hide.

Sizes are the contract's proxies (the same code and divisibility, a tail), inputs are of every style, memory that nobody
wrote is poisoned, scratch is dirty, and neither inputs nor what lies around them may change. On a GPU one case also
runs on two streams at once. A device has more units than proxies have tiles, so programs that walk over the rows are
also verified on one of few units, where each goes round at least twice. What depends on the number of rows itself is
left to ``whole``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from liger_registry.accuracy import Verdict, judge
from liger_registry.config import Config
from liger_registry.examples import STYLES
from liger_registry.implementation import Implementation
from liger_registry.op import DimKind, Op
from liger_registry.problem import BACKWARD, Problem, bucket
from liger_registry.tuning.case_cache import CaseCache
from liger_registry.tuning.cases import FEW_UNITS, LARGE, Case, evaluate, reduced
from liger_registry.tuning.layouts import Poisoned, bits, dirty
from liger_registry.tuning.streams import differs

if TYPE_CHECKING:
    from liger_registry.device import Device

    Tensors = tuple[torch.Tensor | None, ...]
    Bound = tuple[tuple[str, ...], Tensors, Any, tuple[bool, ...]]

__all__ = ["Verification", "evaluate", "proxies_for", "run_case", "verify", "walk_for"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What verification found.

    Attributes:
        passed: whether every verdict holds.
        verdicts: one for each result of each case; verification ends with the first case that fails.
        detail: the verdicts that do not hold, as text; empty if it passed.
    """

    passed: bool
    verdicts: tuple[Verdict, ...]
    detail: str

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Verification:
        """The verification that these verdicts make; none at all are no proof, and fail."""
        wrong = [str(v) for v in verdicts if not v.passed]
        return cls(bool(verdicts) and not wrong, tuple(verdicts), "; ".join(wrong) if verdicts else "no case was run")


def proxies_for(
    op: Op, implementation: Implementation, config: Config, problem: Problem, device: Device
) -> tuple[Mapping[str, int], ...]:
    """The sizes at which a config is verified: the contract's proxies, as far as it is legal there.

    Where the largest of them is too small for the config, as for slabs of 1,024 rows, the smallest power of two that is
    not takes its place, with a tail of 5; if there is none, the problem's own sizes.
    """

    def legal(dims: Mapping[str, int]) -> bool:
        return implementation.why_illegal(config, problem.having(**dims), device) is None

    proxies = op.proxies(problem)
    found = tuple(dims for dims in proxies if legal(dims))
    largest = max(proxies, key=lambda dims: math.prod(dims.values()), default={})
    if largest in found:
        return found
    buckets = [name for name, kind in op.dims.items() if kind is DimKind.BUCKET]
    own = {name: int(getattr(problem, name)) for name in buckets}
    size = bucket(max((largest.get(name, 1) for name in buckets), default=1))
    while size <= max(own.values(), default=0):
        grown = {name: min(size, n) + 5 for name, n in own.items()}
        if legal(grown):
            return (*found, grown)
        size *= 2
    return (*found, {})


def walk_for(
    op: Op,
    implementation: Implementation,
    config: Config,
    problem: Problem,
    device: Device,
    proxies: Sequence[Mapping[str, int]],
) -> Mapping[str, int] | None:
    """The sizes at which every program of a persistent grid on ``FEW_UNITS`` units goes round twice, with a tail.

    They are the largest of the proxies, or more rows if the config's ``programs_per_unit`` and ``block_rows`` say that
    those are one round. None where even the proxies are large, which takes a config that is legal nowhere else.
    """
    largest = max(proxies, key=lambda dims: _elements(problem.having(**dims)), default=None)
    if largest is None or _elements(problem.having(**largest)) > LARGE:
        return None
    buckets = [name for name, kind in op.dims.items() if kind is DimKind.BUCKET]
    programs, rows = config.get("programs_per_unit", 0), config.get("block_rows", 1)
    if len(buckets) == 1 and isinstance(programs, int) and isinstance(rows, int):
        here = int(getattr(problem.having(**largest), buckets[0]))
        grown = {**largest, buckets[0]: max(here, 2 * FEW_UNITS * programs * rows + 5)}
        if implementation.why_illegal(config, problem.having(**grown), device) is None:
            return grown
    return largest


def _elements(problem: Problem) -> int:
    return math.prod(int(getattr(problem, name)) for name in problem.dims)


def verify(
    op: Op,
    implementation: Implementation,
    config: Config,
    problem: Problem,
    device: Device,
    torch_device: torch.device | str,
    *,
    seed: int = 0,
    styles: Sequence[str] = STYLES,
    proxies: Sequence[Mapping[str, int]] | None = None,
    walk: Mapping[str, int] | None = None,
    cache: CaseCache | None = None,
    full: bool = True,
    starting: Callable[[int], None] = lambda index: None,
) -> Verification:
    """Hold an implementation with a config against the reference.

    Args:
        op: the operation.
        implementation: the candidate.
        config: its config.
        problem: the problem; its proxies are what runs.
        device: the device it is verified for.
        torch_device: where the tensors lie.
        seed: fixes the inputs.
        styles: of the inputs.
        proxies: sizes in place of the contract's.
        walk: sizes for a device of few units; with ``proxies`` alone, there are none.
        cache: cases to share with other candidates of the same problem.
        full: with tensors of every layout; else with contiguous ones alone, which says that a candidate is worth timing
            and not yet that it may serve.
        starting: told the number of each case before it is made.

    Returns:
        A verification; a wrong result is no exception, but whatever the candidate itself raises passes through.
    """
    if proxies is None:
        proxies = proxies_for(op, implementation, config, problem, device)
        walk = walk_for(op, implementation, config, problem, device, proxies)
    cases = (cache or CaseCache(0)).get(op, problem, proxies, styles, seed, torch_device, full, walk)
    verdicts: list[Verdict] = []
    for index, make in enumerate(cases):
        starting(index)
        # One case is enough for what calls share, and the first is the one that least has to be compiled for.
        found = run_case(op, implementation, config, make(), device, huge=index % 2 == 1, together=index == 0)
        verdicts += found
        if not all(v.passed for v in found):
            break
    return Verification.of(verdicts)


def run_case(
    op: Op,
    implementation: Implementation,
    config: Config,
    case: Case,
    device: Device,
    *,
    huge: bool = False,
    together: bool = False,
) -> list[Verdict]:
    """The verdicts on one case.

    Args:
        op: the operation.
        implementation: the candidate.
        config: its config.
        case: the inputs and the right results.
        device: the device it is verified for.
        huge: poison memory with large numbers instead of NaN.
        together: on a GPU, also run it on two streams at once, if it is deterministic.
    """
    names, tensors, call, needs = call_of(op, implementation, config, case, device)
    # Of the sizes that results have, since scratch often has them too, in their dtype or in float32.
    sizes = sorted({t.numel() * size for t in case.formula.values() for size in (t.element_size(), 4)})
    before = [bits(buffer).clone() for buffer in case.buffers]
    allowed = [(t, t.clone()) for t in _overwritten(op, case)]
    verdicts: list[Verdict] = []
    try:
        results = run_poisoned(call, tensors, sizes, huge)
        problem = shape_fault(results, names, needs, case) or _strides_of(results, op, case)
        if problem:
            return [fault(case.label, "results", problem)]
        found = {name: result for name, result in zip(names, results, strict=True) if result is not None}
        verdicts = [judge_result(op, case, name, result) for name, result in found.items()]
        for view, values in allowed:
            view.copy_(values)
        if implementation.deterministic:
            # The other poison: equal bits also show that nothing undefined took part.
            again = dict(zip(names, run_poisoned(call, tensors, sizes, not huge), strict=True))
            second = [torch.empty(0) if again[name] is None else bits(again[name]) for name in found]
            same = _same([bits(result) for result in found.values()], second)
            verdicts += [
                fault(case.label, name, "declared deterministic, but a second run gives other bits")
                for name, equal in zip(found, same, strict=True)
                if not equal
            ]
            on_gpu = any(t is not None and t.is_cuda for t in tensors)
            if together and on_gpu and not allowed and all(v.passed for v in verdicts) and differs(call, tensors, huge):
                verdicts.append(fault(case.label, "results", "beside a call on another stream they are others"))
    finally:
        for view, values in allowed:  # what lies around it may not have changed all the same
            view.copy_(values)
        kept = _same(before, [bits(buffer) for buffer in case.buffers])
        changed = [number for number, equal in enumerate(kept) if not equal]
        for number in changed:  # the case may be another candidate's next
            case.buffers[number].copy_(before[number].view(case.buffers[number].dtype))
    if changed:
        verdicts.append(fault(case.label, "inputs", "it wrote into its inputs, or beside them"))
    return verdicts


def _overwritten(op: Op, case: Case) -> list[torch.Tensor]:
    """The inputs that backward may write into, and the buffers that it may hand over."""
    scheme = op.scheme(case.problem.scheme)
    if case.problem.phase != BACKWARD:
        return []
    there = dict(zip((i.name for i in op.inputs), case.inputs, strict=True))
    inputs = [there[name] for name, option in op.overwrites.items() if case.options[option]]
    kept = dict(zip((*scheme.saved_outputs, *scheme.saved), case.saved, strict=True))
    return [t for t in (*inputs, *(kept[name] for name in scheme.owned)) if t is not None]


def call_of(op: Op, implementation: Implementation, config: Config, case: Case, device: Device) -> Bound:
    """What a candidate is called with for a case, and how."""
    if case.units:
        device = replace(device, units=min(device.units, case.units))
    tensors = case.inputs, case.grad_outputs, case.saved
    return bind_results(op, implementation, config, case.problem, device, *tensors, options=case.options)


def bind_results(
    op: Op,
    implementation: Implementation,
    config: Config,
    problem: Problem,
    device: Device,
    inputs: Tensors,
    grad_outputs: Tensors,
    saved: Tensors,
    options: Mapping[str, Any] | None = None,
) -> Bound:
    """Names of the results, the arguments, the bound launch function, and which results are wanted."""
    scheme, options = op.scheme(problem.scheme), op.options_of(problem) if options is None else options
    if problem.phase != BACKWARD:
        names = (*op.outputs, *scheme.saved)
        call = implementation.bind(config, device, options, op.needs_of(problem), problem)
        return names, inputs, call, (True,) * len(names)
    there = dict(zip((i.name for i in op.inputs), inputs, strict=True))
    needs = op.needs(problem)
    saved_inputs = tuple(there[name] for name in scheme.saved_inputs)
    names = tuple(f"grad_{name}" for name in op.differentiable)
    call = implementation.bind(config, device, options, needs, problem)
    return names, (*grad_outputs, *saved_inputs, *saved), call, needs


def run_poisoned(call: Any, tensors: Tensors, sizes: Sequence[int], huge: bool) -> tuple[Any, ...]:  # noqa: ANN401
    """The results of a call to which memory that nobody wrote is poison; scratch of ``sizes`` bytes is dirty."""
    place = next(t.device for t in tensors if t is not None)
    fences = dirty(place, sizes, huge)
    guard: Any = torch.cuda.device(place) if place.type == "cuda" else nullcontext()
    with guard, torch.no_grad(), Poisoned(huge):
        results = call(*tensors)
    del fences
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return results if isinstance(results, tuple) else (results,)


def _same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[bool]:
    """Which pairs of tensors are equal, with one synchronisation for all of them."""
    fits = [a.shape == b.shape for a, b in zip(ours, theirs, strict=True)]
    flags = [(a == b).all() for a, b, fit in zip(ours, theirs, fits, strict=True) if fit]
    equal = iter(torch.stack(flags).tolist() if flags else ())
    return [fit and next(equal) for fit in fits]


def shape_fault(results: Sequence[Any], names: Sequence[str], needs: Sequence[bool], case: Case) -> str:
    """What is wrong with the results before a number is looked at; empty if nothing is."""
    if len(results) != len(names):
        return f"{len(results)} of them, not {len(names)} ({', '.join(names)})"
    for name, result, need in zip(names, results, needs, strict=True):
        expected = case.formula.get(name)
        if expected is None or not need:
            if result is not None:
                return f"{name} is not asked for, and was computed"
        elif not isinstance(result, torch.Tensor):
            return f"{name} is a {type(result).__name__}, not a tensor"
        elif result.device != expected.device:
            return f"{name} lies on {result.device}, not on {expected.device}"
        elif result.requires_grad:
            return f"{name} requires a gradient, so it holds an autograd graph"
    return ""


def _strides_of(results: Sequence[torch.Tensor | None], op: Op, case: Case) -> str:
    """Forward results whose strides are not those the scheme allocates: compiled code was traced with these."""
    if case.problem.phase == BACKWARD:
        return ""
    names = (*op.outputs, *op.scheme(case.problem.scheme).saved)
    needs = op.needs_of(case.problem)
    told = {} if needs is None else {"needs": needs}
    allocated = op.scheme(case.problem.scheme).allocate(*case.inputs, **case.options, **told)
    for name, result, like in zip(names, results, allocated, strict=True):
        if (result is None) is not (like is None):
            return f"{name} is {'absent' if result is None else 'there'}, the scheme says otherwise"
        if result is None or like is None:
            continue
        if result.shape == like.shape and result.numel():
            sizes = zip(result.shape, result.stride(), like.stride(), strict=True)
            if any(size > 1 and have != want for size, have, want in sizes):
                return f"{name} has strides {result.stride()}, the scheme allocates {like.stride()}"
    return ""


def judge_result(op: Op, case: Case, name: str, result: torch.Tensor) -> Verdict:
    """The verdict on one result of a case."""
    truth, formula = case.truth[name], case.formula[name]
    if not formula.is_floating_point():
        same = result.shape == formula.shape and result.dtype == formula.dtype
        if same and bool(((result == formula) | (result == truth)).all()):
            return Verdict(f"{case.label}: {name}", 0.0, 0.0, 0.0, 0.0)
        return fault(case.label, name, "its integers differ from the reference's")
    verdict = judge(name, result, truth, formula, case.magnitude[name], reduced(op, name, case.problem))
    return replace(verdict, name=f"{case.label}: {name}")


def fault(label: str, name: str, problem: str) -> Verdict:
    """A verdict on what no number tells."""
    return Verdict(f"{label}: {name}", math.inf, 0.0, math.inf, 0.0, problem)
