"""Ours, called as users call it, in three states: chosen from tables, without any, and as another GPU would have it.

``ours`` is ``registry.get(op)`` with whatever tables this machine has. ``default`` is the same with
``LIGER_TUNE_MODE=off``: pins aside, the heuristics answer. ``other`` pins what tables and heuristics say for another
GPU, stages of composites included. The differences are what tuning is worth on this device, operation by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.inputs import EPS, Call, Inputs
from benchmarks.peers import Peer
from liger_registry import registry
from liger_registry.decision import Decision
from liger_registry.device import Device
from liger_registry.errors import RegistryError
from liger_registry.handle import Handle
from liger_registry.kernels.linear_heuristics import row_slab_bytes
from liger_registry.problem import Problem
from liger_registry.runtime import Registry

#: The GPU whose choices are tried here; set by the command.
OTHER = ["a100"]
PHASES = ("forward", "backward")
_NORMS = ("rms_norm", "fused_add_rms_norm", "qk_norm_rope")


def options_of(case: Case) -> dict[str, Any]:
    """The options of the call of a case."""
    if case.op in _NORMS:
        return {"eps": EPS, "offset": case.offset, "casting": case.casting}
    found: dict[str, Any] = {}
    if case.op == "layer_norm":
        found["eps"] = EPS
    if case.softcap:
        found["softcap"] = case.softcap
    if case.in_place:
        found["in_place"] = True
    if case.slab_rows:
        found["accumulate"] = "input"
    return found


def budget_of(case: Case, inputs: Inputs, source: Registry) -> int | None:
    """The memory budget of a case: what a slab of so many rows takes, as the operation counts it."""
    if not case.slab_rows:
        return None
    op = source.op(case.op)
    tensors, options = op.bind(inputs.tensors, options_of(case))
    needs = _needs(case, inputs, source)
    problem, _ = source.problem_of(op, tensors, options, "forward", needs, None)
    needed = row_slab_bytes(problem, case.slab_rows)
    step = 1 << max(needed.bit_length() - 3, 0)
    return -(-needed // step) * step  # a key knows no finer budgets, and rounds down


def _needs(case: Case, inputs: Inputs, source: Registry) -> tuple[bool, ...]:
    op = source.op(case.op)
    tensors, _ = op.bind(inputs.tensors, options_of(case))
    pairs = zip(op.inputs, tensors, strict=True)
    return tuple(t is not None and t.requires_grad for spec, t in pairs if spec.differentiable)


def handle_of(case: Case, inputs: Inputs, source: Registry = registry) -> Handle:
    """The handle of a case."""
    return source.get(case.op, memory_budget=budget_of(case, inputs, source))


def _call(handle: Handle, case: Case) -> Call:
    options = options_of(case)
    return lambda *tensors: handle(*tensors, **options)


def make(case: Case, inputs: Inputs) -> Call:
    """The call as users write it."""
    return _call(handle_of(case, inputs), case)


_off: dict[int, Registry] = {}


def untabled() -> Registry:
    """A registry of the same settings that reads no table and has no pins."""
    settings = registry.settings
    if id(settings) not in _off:
        _off.clear()
        _off[id(settings)] = Registry(replace(settings, mode="off", pins=()))
    return _off[id(settings)]


def make_default(case: Case, inputs: Inputs) -> Call:
    """The call where no table is read."""
    return _call(handle_of(case, inputs, untabled()), case)


def make_other(case: Case, inputs: Inputs) -> Call:
    """The call with what another GPU would run, pinned here.

    Raises:
        RegistryError: it would run what this device cannot.
    """
    handle, call = handle_of(case, inputs), make(case, inputs)
    pins = pins_of([(problem, budget) for problem, budget in problems(case, inputs, handle)], Device.parse(OTHER[0]))

    def pinned(*tensors: torch.Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            for (op, phase), decision in pins.items():
                stack.enter_context(registry.use(op, {phase: name_here(decision)}, decision.config))
            return call(*tensors)

    return pinned


def name_here(decision: Decision) -> str:
    """What this device's vendor calls an implementation of another's."""
    vendor = decision.implementation.capability.vendor
    return (
        decision.implementation.id if vendor == "any" else f"{registry.device.emulates}:{decision.implementation.name}"
    )


def problems(case: Case, inputs: Inputs, handle: Handle) -> list[tuple[Problem, int | None]]:
    """Forward's and backward's problems of a case, and the budgets they are held to."""
    op = handle.op
    tensors, options = op.bind(inputs.tensors, options_of(case))
    needs = _needs(case, inputs, registry)
    scheme = registry.scheme_of(op, tensors, options, needs, handle.budget)
    return [registry.problem_of(op, tensors, options, phase, needs, handle.budget, scheme) for phase in PHASES]


def pins_of(asked: list[tuple[Problem, int | None]], device: Device) -> Mapping[tuple[str, str], Decision]:
    """What problems are decided as on a device, which need not be present, with the stages of composites."""
    found: dict[tuple[str, str], Decision] = {}
    for problem, budget in asked:
        decision = registry.decide(problem, device, registry.terms(budget=budget))
        found[problem.op, problem.phase] = decision
        stages = decision.implementation.stages
        if stages is not None:
            inner: list[tuple[Problem, int | None]] = [(p, None) for p in stages(problem, decision.config).values()]
            found |= pins_of(inner, device)
    return found


def decisions(state: str, case: Case, inputs: Inputs) -> list[str]:
    """What a state of ours runs, one line a phase."""
    try:
        if state == "other":
            pins = pins_of(problems(case, inputs, handle_of(case, inputs)), Device.parse(OTHER[0]))
            return [f"{op}/{phase}: {decision}" for (op, phase), decision in pins.items()]
        source = registry if state == "ours" else untabled()
        explained = handle_of(case, inputs, source).explain(*inputs.tensors, **options_of(case))
        return [f"{e.decision.problem.op}/{e.decision.problem.phase}: {e.decision}" for e in explained]
    except RegistryError as error:
        return [f"{type(error).__name__}: {error}"]


PEERS = {
    "ours": Peer("ours", make),
    "default": Peer("default", make_default),
    "other": Peer("other", make_other),
}
