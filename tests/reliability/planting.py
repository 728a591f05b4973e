"""Where faults are planted, and which places matter: what the faults of ``faults`` have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from liger_registry import registry
from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.errors import RegistryError
from liger_registry.implementation import Implementation
from liger_registry.op import Op
from liger_registry.problem import BACKWARD, Problem
from liger_registry.reference import reference_implementation
from liger_registry.tuning.cases import make_case, marking
from liger_registry.tuning.verify import call_of

Launch = Callable[..., tuple[Any, ...]]
Variants = Iterator[tuple[str, Launch]]


@dataclass(frozen=True)
class Place:
    """Where a fault is planted."""

    op: Op
    problem: Problem
    right: Launch

    @property
    def scheme(self):
        return self.op.scheme(self.problem.scheme)

    @property
    def tensors(self) -> tuple[str, ...]:
        """What a launch function gets, in order."""
        if self.problem.phase != BACKWARD:
            return tuple(i.name for i in self.op.inputs)
        scheme = self.scheme
        gradients = tuple(f"grad_of_{name}" for name in self.op.outputs)
        return (*gradients, *scheme.saved_inputs, *scheme.saved_outputs, *scheme.saved)

    @property
    def results(self) -> tuple[str, ...]:
        if self.problem.phase != BACKWARD:
            return (*self.op.outputs, *self.scheme.saved)
        return tuple(f"grad_{name}" for name in self.op.differentiable)

    def given(self, tensors) -> dict[str, Any]:
        return dict(zip(self.tensors, tensors, strict=True))


def place_of(op: Op, problem: Problem) -> Place:
    return Place(op, problem, reference_implementation(op, problem).launch)


def planted(place: Place, name: str, launch: Launch, deterministic: bool = True) -> Implementation:
    """An implementation that has the fault; it declares to be deterministic unless that would give it away."""
    return Implementation(
        place.op.name, place.problem.phase, name, launch, place.problem.scheme, deterministic=deterministic,
        distribution="planted",
    )  # fmt: skip


def after(place: Place, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Launch:
    """The right results, one of which is then changed."""

    def launch(*tensors, **rest):
        results = list(place.right(*tensors, **rest))
        at = place.results.index(name)
        if isinstance(results[at], torch.Tensor) and results[at].is_floating_point() and results[at].numel():
            results[at] = change(results[at].clone(memory_format=torch.preserve_format))
        return tuple(results)

    return launch


def before(place: Place, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Launch:
    """One tensor is changed on the way in."""

    def launch(*tensors, **rest):
        changed = [change(t) if n == name and t is not None else t for n, t in zip(place.tensors, tensors, strict=True)]
        return place.right(*changed, **rest)

    return launch


@functools.lru_cache(maxsize=4)
def _case_of(problem: Problem):
    # Not of one column or row, where many a wrong stride is right.
    op = registry.op(problem.op)
    small = problem.having(**op.proxies(problem)[0])
    return make_case(op, op.scheme(problem.scheme), small, "random", 0, "cpu")


def middling_case(place: Place):
    return _case_of(place.problem)


def shapes_of(place: Place) -> dict[str, torch.Size]:
    """The shapes of floating results at the first of the proxies."""
    case = middling_case(place)
    needs = dict(zip((f"grad_{n}" for n in place.op.differentiable), place.op.needs(place.problem), strict=True))
    return {
        name: case.formula[name].shape
        for name in place.results
        if name in case.formula
        and case.formula[name].is_floating_point()
        and needs.get(name, True)
        and case.formula[name].numel()
    }


def read_tensors(place: Place, least: int, integers: bool = False) -> Iterator[str]:
    """The names of tensors that the results depend on: inputs and gradients, not what forward itself saved."""
    case = middling_case(place)
    there = dict(zip((i.name for i in place.op.inputs), case.inputs, strict=True))
    if place.problem.phase == BACKWARD:
        there = {n: there[n] for n in place.scheme.saved_inputs}
        there |= {f"grad_of_{n}": g for n, g in zip(place.op.outputs, case.grad_outputs, strict=True)}
    for name, tensor in there.items():
        if tensor is None or tensor.dim() < least or tensor.numel() < 2 or tensor.shape[-1] < 2:
            continue
        if (tensor.is_floating_point() or integers) and _matters(place, case, name):
            yield name


def _matters(place: Place, case, name: str) -> bool:
    """Whether other values of a tensor give other results, as those of zeros do not behind a mask."""

    def other(t):
        flipped = t.flip(0) * 1.5 if t.is_floating_point() else t.roll(1, 0)
        return flipped.contiguous()

    return not same_results(
        results_of(place, case, place.right, {}), results_of(place, case, before(place, other, name), {})
    )


def observable(place: Place, option, value) -> bool:
    """Whether some call of this problem gives other results if the option is taken to have a value."""
    op, small = place.op, place.problem.having(**place.op.proxies(place.problem)[0])
    own = op.options_of(place.problem)
    tried = {float: (0.1, 0.3, 0.8, 1.7, 30.0), int: (-3,), str: option.choices, bool: ()}[option.kind]
    if option.kind is int and option.default >= 0:
        tried = ()
    for other in (own[option.name], *tried):
        options = {**own, option.name: other}
        if other == value:
            continue
        try:
            inputs = op.example(small, "cpu", 0, "random")
            op.validate(inputs, options)
            described = op.describe(inputs, options)
        except RegistryError:
            continue
        if any(small.flags.get(name) != flag for name, flag in described.flags.items()):
            continue
        mark = marking(op, own, options)
        case = make_case(op, place.scheme, small, "random", 0, "cpu", options=options, reshape=mark)
        try:
            found = results_of(place, case, place.right, {option.name: value})
        except (RuntimeError, ValueError):  # what raises fails its candidate by itself
            return False
        if not same_results(results_of(place, case, place.right, {}), found):
            return True
    return False


def results_of(place: Place, case, launch: Launch, changed: dict[str, Any]) -> tuple[Any, ...]:
    def called(*tensors, **rest):
        return launch(*tensors, **{**rest, **changed})

    _, tensors, call, _ = call_of(place.op, planted(place, "right", called), Config(), case, Device.parse("cpu"))
    with torch.no_grad():
        return call(*[None if t is None else t.clone() for t in tensors])


def same_results(ours, theirs) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    if any((a is None) is not (b is None) for a, b in pairs):
        return False
    return all(a is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)
