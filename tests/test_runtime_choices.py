"""What a registry chooses under budgets, modes and plans."""

from __future__ import annotations

import functools

import fakes
import pytest
import torch
from fake_registry import W, X, build, fake_tuner, problem, run

from liger_registry.errors import (
    PlanError,
    StrictMissError,
    TuningBusyError,
    TuningWarning,
)
from liger_registry.problem import FORWARD


@pytest.fixture
def make(tmp_path):
    """A maker of registries over a fake operation."""
    return functools.partial(build, tmp_path)


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_budgets_argument_before_environment_before_contract(make):
    plain = make()
    assert plain.get(plain.name, memory_budget=5).budget == 5
    op = plain.op(plain.name)
    tensors, options = op.bind((X, W), {})

    def held(registry, budget=None):
        op = registry.op(registry.name)
        key, bytes_held = registry.problem_of(op, tensors, options, FORWARD, (), budget)
        return key.flags.get("budget"), bytes_held

    assert held(plain) == (None, None)
    # Without a budget of the contract's own it is legality alone, and no part of the key.
    assert held(plain, 5) == (None, 5)
    assert held(make(memory_budget=9)) == (None, 9)
    declares = make(op_changes={"budget": lambda problem: 1000}, memory_budget=None)
    assert held(declares) == (512, 1000)
    assert held(declares, 0) == (1, 0)
    assert held(make(op_changes={"budget": lambda problem: 1000}, memory_budget=70)) == (64, 70)


def test_a_small_budget_makes_another_choice(make):
    registry = make()
    with registry.use(registry.name, "tiled"):
        assert run(registry, X, W) == "tiled"
    found = registry.get(registry.name, memory_budget=0).explain(X, W)[0]
    assert found.decision.implementation.name == "plain"
    tight = make(memory_budget=10)
    wanted = problem(tight)
    with tight.use(tight.name, "tiled"), pytest.raises(RuntimeError, match="the budget is 10"):
        tight.decide(wanted, fakes.CPU)


# --- misses and modes -------------------------------------------------------------------------------------------------


def test_misses_are_recorded_once(make):
    registry = make()
    for _ in range(3):
        run(registry, X, W)
        run(registry, X[:3], W)  # the same bucket
    assert [p for _, p in registry.misses.all()] == [problem(registry)]
    registry.get(registry.name).explain(X[:1], W)
    assert len(registry.misses.all()) == 1


def test_strict_raises_in_a_call(make):
    registry = make(mode="strict")
    with pytest.raises(StrictMissError):
        run(registry, X, W)
    with registry.use(registry.name, "plain"):
        assert run(registry, X, W) == "plain"


def test_mode_tune_goes_on_where_tuning_fails(make, monkeypatch):
    registry = make(mode="tune")

    def busy(problems, **options):
        raise TuningBusyError("another process tunes")

    fake_tuner(monkeypatch, busy)
    with pytest.warns(TuningWarning, match="another process tunes"):
        assert run(registry, X, W) == "plain"
    assert len(registry.misses.all()) == 1


# --- plans ------------------------------------------------------------------------------------------------------------


def test_freeze_decides_what_was_called_and_what_tables_hold(make):
    registry = make()
    run(registry, X, W)
    called = problem(registry)
    tabled = called.having(rows=4096)
    odd = fakes.Problem(registry.name, "default", FORWARD, fakes.Fields(rows=4), called.dtypes, called.flags)
    other = registry.catalog.find(registry.name, "default", FORWARD, "other")
    hashed = {"source": fakes.source_hash(other.launch)}
    registry.user_store.record(
        fakes.CPU, registry.name, [fakes.stored(p, "any:other", None, **hashed) for p in (tabled, odd)]
    )
    plan = registry.freeze()
    assert {p for _, p in plan} == {called, tabled}
    assert registry.plan is plan
    assert plan.get(fakes.CPU.fingerprint, tabled).implementation == "any:other"
    assert registry.get(registry.name).explain(X, W)[0].decision.source == "plan"
    assert run(registry, X, W) == "other"  # near, when it was frozen
    assert run(registry, torch.ones(3, 32), torch.ones(32)) == "plain"
    registry.thaw()
    assert registry.plan is None
    assert registry.get(registry.name).explain(X, W)[0].decision.source == "near"


def test_freeze_of_given_problems(make):
    registry = make()
    wanted = problem(registry)
    assert {p for _, p in registry.freeze(problems=iter([wanted]))} == {wanted}
    with pytest.raises(PlanError, match="rank 0 could not decide"):
        registry.freeze(problems=[fakes.problem()])  # an operation that is not there
    with pytest.raises(PlanError, match="rank 0 could not say"):
        registry.freeze(problems=["text"])


def test_freeze_keeps_to_the_budget(make):
    registry = make(memory_budget=3200)
    wanted = problem(registry)
    launch = registry.catalog.find(registry.name, "default", FORWARD, "tiled").launch
    entry = fakes.stored(wanted, "any:tiled", 64, source=fakes.source_hash(launch))
    registry.user_store.record(fakes.CPU, registry.name, [entry])
    plan = registry.freeze(problems=[wanted])
    assert plan.get(fakes.CPU.fingerprint, wanted).implementation == "any:plain"
    assert registry.decide(wanted, fakes.CPU).source == "plan"
