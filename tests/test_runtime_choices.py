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
    assert held(declares) == (896, 1000)
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


def test_a_miss_inside_a_call_waits_for_no_other_tuner(make, monkeypatch):
    registry, asked = make(mode="tune"), []
    fake_tuner(monkeypatch, lambda problems, **options: asked.append(options))
    run(registry, X, W)
    assert asked[0]["lock_timeout_s"] == 0


def test_the_last_tier_says_that_it_is_over_the_budget(make):
    hungry = {"extra_bytes": lambda problem, config: 100}
    registry = make(memory_budget=10)
    op = registry.name
    frugal = fakes.catalog(op=fakes.make_op("hungry"), own=[fakes.implementation("plain", op="hungry", **hungry)])
    registry = type(registry)(registry.settings, frugal)
    (found,) = registry.get("hungry").explain(X, W)
    assert found.decision.source == "reference"
    assert "over the budget" in found.decision.detail
    assert "over the budget" in str(found)
    (found,) = registry.get("hungry", memory_budget=100).explain(X, W)
    assert found.decision.source == "heuristic"
    assert op != "hungry"


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


def test_a_second_freeze_has_what_the_first_had(make):
    registry = make()
    run(registry, X, W)
    first = registry.freeze()
    assert len(first) == 1
    assert registry.freeze() == first
    registry.thaw()
    assert registry.freeze() == first
    registry.register(fakes.implementation("new", op=registry.name))
    registry.forget()
    assert registry.freeze() == first
    run(registry, torch.ones(64, 32), torch.ones(32))
    assert len(registry.freeze()) == 2


@pytest.mark.parametrize("part", ["settings", "device", "dispatcher"])
def test_whatever_fails_before_the_first_exchange_is_a_plan_error(make, monkeypatch, part):
    registry = make()
    run(registry, X, W)
    registry.freeze()

    def broken(self):
        raise OSError("planted")

    monkeypatch.setattr(type(registry), part, property(broken))
    with pytest.raises(PlanError, match="rank 0 could not say") as caught:
        registry.freeze()
    assert "planted" in caught.value.why
    monkeypatch.undo()
    assert registry.plan is None  # as on the other ranks


def test_kernels_that_cannot_be_loaded_are_a_plan_error(make, monkeypatch):
    from liger_registry.tuning import preload

    def broken(*arguments):
        raise OSError("planted")

    registry = make()
    run(registry, X, W)
    monkeypatch.setattr(preload, "preload", broken)
    with pytest.raises(PlanError, match="cannot carry the plan out"):
        registry.freeze(compile=True)
    assert registry.plan is None


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
