"""Planted numeric faults: what the tuner's verification catches in every registered operation, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from faults import FAULTS, every_plant
from planting import place_of, planted

from liger_registry import registry
from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.tuning import whole
from liger_registry.tuning.arguments import Arguments
from liger_registry.tuning.case_cache import CaseCache
from liger_registry.tuning.odd import problems_for
from liger_registry.tuning.verify import verify

CPU = Device.parse("cpu")
PLACES = [
    (op.name, scheme.name, phase)
    for op in registry.catalog.ops()
    for scheme in op.schemes
    for phase in (FORWARD, BACKWARD)
    if phase == FORWARD or op.differentiable
]
#: A few are in the first tier; one whose smallest cases have 4,101 tokens is in the last.
MARKS = {
    **dict.fromkeys(("rms_norm", "softmax", "swiglu", "relu_squared"), ()),
    "fused_linear_jsd": (pytest.mark.slow,),
}
#: A sum over so few terms that even one in bf16 is as exact as the rule asks for (1 ulp of the result): no fault there.
WIDE = 1024


@dataclass
class Count:
    """What was planted and what was caught, by fault; the names of what was not."""

    planted: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def __str__(self):
        parts = (f"{fault} {self.caught[fault]}/{n}" for fault, n in self.planted.items())
        return f"{self.caught.total()} of {self.planted.total()}: {', '.join(parts)}"


def problems_of(name: str, scheme: str, phase: str, dtype: str, every: bool = False):
    """The contract's own odd problem of middling width in a dtype; with ``every``, one for each of its flags."""
    op = registry.op(name)
    found = [p for p in problems_for(op, scheme, phase) if dtype in p.dtypes.values()]
    found = [p for p in found if set(p.dtypes.values()) <= {dtype, "none"}] or found
    middling = [p for p in found if 16 < max(p.dims.values()) <= 261 and min(p.dims.values()) > 1] or found
    seen = {}
    for problem in middling:
        seen.setdefault((problem.flags, tuple(n for n, d in problem.dtypes.items() if d == "none")), problem)
    chosen = list(seen.values())
    return chosen if every else chosen[:1]


def count(name: str, scheme: str, phase: str, dtype: str, every: bool = False, faults: tuple[str, ...] = ()) -> Count:
    """Plant each fault in each place of an operation, and have the tuner's verification look at it."""
    op, found = registry.op(name), Count()
    for problem in problems_of(name, scheme, phase, dtype, every):
        cache = CaseCache()
        right = verify(op, planted(place_of(op, problem), "right", place_of(op, problem).right), Config(), problem, CPU,
                       "cpu", cache=cache)  # fmt: skip
        assert right.passed, f"{problem.text}: {right.detail}"
        for fault, where, implementation in every_plant(op, problem, faults):
            if fault == "narrow_sums" and dtype == "bfloat16" and max(problem.dims.values()) < WIDE:
                continue
            found.planted[fault] += 1
            try:
                passed = verify(op, implementation, Config(), problem, CPU, "cpu", cache=cache).passed
            except (RuntimeError, IndexError, ValueError):
                passed = False  # what raises fails its candidate
            if passed:
                found.missed.append(f"{fault} of {where} in {problem.text}")
            else:
                found.caught[fault] += 1
    return found


@pytest.mark.parametrize(
    ("name", "scheme", "phase"),
    [pytest.param(*place, marks=MARKS.get(place[0], (pytest.mark.ci,))) for place in PLACES],
)
def test_every_planted_fault_is_caught(name: str, scheme: str, phase: str):
    found = count(name, scheme, phase, "bfloat16")
    # What is lost in a cast shows where there is something to lose.
    wide = count(name, scheme, phase, "float32", faults=("narrow_sums", "early_cast"))
    found = Count(found.planted + wide.planted, found.caught + wide.caught, found.missed + wide.missed)
    print(f"{name}/{scheme}/{phase}: {found}")
    assert found.missed == []
    assert found.planted.total() >= 5, "nothing was planted"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(("name", "scheme", "phase"), PLACES)
def test_every_planted_fault_is_caught_with_every_flag(name: str, scheme: str, phase: str, dtype: str):
    found = count(name, scheme, phase, dtype, every=True)
    print(f"{name}/{scheme}/{phase} in {dtype}: {found}")
    assert found.missed == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "scheme", "phase"),
    [
        ("cross_entropy", "default", FORWARD),
        ("cross_entropy", "default", BACKWARD),
        ("fused_add_rms_norm", "default", FORWARD),
        ("fused_add_rms_norm", "default", BACKWARD),
        ("fused_linear_cross_entropy", "recompute", FORWARD),
        ("group_norm", "default", FORWARD),
        ("group_norm", "default", BACKWARD),
        ("linear_logp", "recompute", FORWARD),
        ("logit_statistics", "default", FORWARD),
        ("rms_norm", "default", FORWARD),
        ("rms_norm", "default", BACKWARD),
        ("softmax", "default", BACKWARD),
    ],
)
def test_sums_in_bf16_at_wide_rows(name: str, scheme: str, phase: str):
    op = registry.op(name)
    pure = [p for p in problems_for(op, scheme, phase) if set(p.dtypes.values()) <= {"bfloat16", "none"}]
    problem = max(pure, key=lambda p: max(p.dims.values()))
    assert max(problem.dims.values()) >= WIDE
    planted_here = [item for _, _, item in every_plant(op, problem, ("narrow_sums",))]
    assert planted_here
    for item in planted_here:
        assert not verify(op, item, Config(), problem, CPU, "cpu").passed


@pytest.mark.ci
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_sums_in_bf16_over_many_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    """At a problem's own sizes, with every element compared, as on a GPU."""
    monkeypatch.setattr(whole, "SLOW_S", float("inf"))
    op, (problem,) = registry.op(name), problems_of(name, "default", BACKWARD, "bfloat16")
    tall = problem.having(rows=4096)
    arguments = Arguments.of(op, tall, torch.device("cpu"))
    right = planted(place_of(op, tall), "right", place_of(op, tall).right)
    found = whole.verify_whole(op, right, Config(), tall, CPU, arguments)
    assert found.passed, found.detail
    planted_here = [item for _, _, item in every_plant(op, tall, ("narrow_sums",))]
    assert planted_here
    for item in planted_here:
        assert "grad_weight" in whole.verify_whole(op, item, Config(), tall, CPU, arguments).detail


def test_every_fault_has_a_place():
    """In operations enough that none of the faults is planted nowhere."""
    places = {fault for name in ("rms_norm", "swiglu") for phase in (FORWARD, BACKWARD)
              for dtype in ("float32", "bfloat16") for problem in problems_of(name, "default", phase, dtype, every=True)
              for fault, _, _ in every_plant(registry.op(name), problem)}  # fmt: skip
    assert places == set(FAULTS)
