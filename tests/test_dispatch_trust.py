"""What a dispatcher takes from plugins and from tables of others: whatever goes wrong there, the next answer stands."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings

import fakes
import pytest

from liger_registry import Config
from liger_registry.decision import CLUSTER, SHIPPED_TABLES, USER, Terms
from liger_registry.errors import NoImplementationError, PluginError, PluginWarning, StrictMissError
from liger_registry.implementation import _import, source_hash
from liger_registry.plan import Plan
from liger_registry.problem import BACKWARD
from liger_registry.table import Choice

H200, H100, CPU = fakes.H200, fakes.H100, fakes.CPU
PROBLEM = fakes.problem(rows=1024)
MINE = "any:mine"
TIERS = ("exact", "stale", "near", "shipped", "shipped-near", "sibling", "heuristic")


def ask(dispatcher, problem=PROBLEM, device=H200, **terms):
    trace = []
    return dispatcher.decide(problem, device, Terms(**terms), trace), trace


def answer(dispatcher, problem=PROBLEM, device=H200, **terms):
    decision, _ = ask(dispatcher, problem, device, **terms)
    return decision.implementation.id, decision.config.text, decision.source


def record(store, device=H200, problem=PROBLEM, **entry):
    store.record(device, "affine", [fakes.stored(problem, **entry)])


def raises(*arguments):
    raise ZeroDivisionError("planted")


def leaves(*arguments):
    sys.exit("planted")


def mine(**fields):
    return dataclasses.replace(fakes.tiled(vendor="any"), name="mine", **fields)


def with_plugin(root, **fields):
    """A dispatcher whose plugin stands before everything else, once it was verified."""
    dispatcher, stores = fakes.dispatcher(root, cat=fakes.catalog(mine(**fields), own=[]))
    stores[USER].record(H200, "affine", samples=[fakes.sample(fakes.problem(rows=2), MINE, 32)])
    return dispatcher, stores


# --- plugins whose own functions fail ---------------------------------------------------------------------------------


def test_a_plugin_without_a_fault_is_the_control(tmp_path):
    dispatcher, _ = with_plugin(tmp_path)
    assert answer(dispatcher, budget=10**6) == (MINE, "block=32", "heuristic")


FAULTS = {
    "heuristic raises": ({"heuristic": raises}, "its heuristic raised ZeroDivisionError: planted"),
    "heuristic leaves": ({"heuristic": leaves}, "its heuristic raised SystemExit: planted"),
    "heuristic None": ({"heuristic": lambda p, d: None}, "its heuristic gave None, which is no Config"),
    "heuristic dict": ({"heuristic": lambda p, d: {"block": 32}}, "its heuristic gave {'block': 32}"),
    "heuristic illegal": ({"heuristic": lambda p, d: Config(block=31)}, "block=31 is not declared"),
    "heuristic foreign": ({"heuristic": lambda p, d: Config(rows=1)}, "it has (rows), the space has (block)"),
    "space raises": ({"space": fakes.SPACE.where(raises)}, "its space raised ZeroDivisionError: planted"),
    "extra raises": ({"extra_bytes": raises}, "its extra_bytes raised ZeroDivisionError: planted"),
    "extra None": ({"extra_bytes": lambda p, c: None}, "its extra_bytes gave None, which is no number of bytes"),
    "extra NaN": ({"extra_bytes": lambda p, c: float("nan")}, "its extra_bytes gave nan"),
}


@pytest.mark.parametrize(("fields", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_plugin_whose_own_functions_fail_is_rejected(tmp_path, fields, reason):
    dispatcher, stores = with_plugin(tmp_path, **fields)
    decision, trace = ask(dispatcher, budget=10**6)
    assert decision.source == "reference"
    assert any(not c.accepted and c.tier == "heuristic" and reason in c.reason for c in trace)
    if "heuristic" not in fields:
        record(stores[USER], implementation=MINE, block=64)
        assert answer(dispatcher, budget=10**6)[2] == "reference"


@pytest.mark.parametrize(("fields", "reason"), FAULTS.values(), ids=FAULTS)
def test_pinning_such_a_plugin_says_why(tmp_path, fields, reason):
    dispatcher, _ = with_plugin(tmp_path, **fields)
    with pytest.raises(NoImplementationError) as caught:
        ask(dispatcher, budget=10**6, pins=(("affine", "mine", None),))
    assert reason in caught.value.why


def test_such_a_plugin_pinned_without_a_phase_is_a_wish_for_backward(tmp_path):
    cat = fakes.catalog(mine(), mine(phase=BACKWARD, launch=fakes.backward, heuristic=raises))
    dispatcher, _ = fakes.dispatcher(tmp_path, cat=cat)
    found = answer(dispatcher, fakes.problem(phase=BACKWARD), pins=(("affine", "mine", None),))
    assert found == ("cuda:tiled", "block=32", "heuristic")


@pytest.mark.parametrize("fields", [{"heuristic": raises}, {"space": fakes.SPACE.where(raises)}])
def test_a_bug_of_this_distribution_is_seen(tmp_path, fields):
    dispatcher, _ = fakes.dispatcher(tmp_path, cat=fakes.catalog(own=[fakes.tiled(**fields)]))
    with pytest.raises(ZeroDivisionError):
        ask(dispatcher)


# --- what others' tables say of plugins, and what was wrong here ------------------------------------------------------


def test_an_exact_answer_of_anothers_table_is_no_proof_for_a_plugin(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path, mine())
    stores[CLUSTER].record(
        H200, "affine", [fakes.stored(PROBLEM, MINE, 64)], [fakes.sample(PROBLEM, MINE, block) for block in (32, 64)]
    )
    decision, trace = ask(dispatcher)
    assert decision.implementation.own
    assert ("exact", False) in [(c.tier, c.accepted) for c in trace]
    assert "not verified on this device" in trace[0].reason
    stores[USER].record(H200, "affine", samples=[fakes.sample(fakes.problem(rows=2), MINE, 32)])
    assert answer(dispatcher) == (MINE, "block=64", "exact")


def test_the_users_own_exact_answer_is_proof(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path, mine())
    record(stores[USER], implementation=MINE, block=64)
    assert answer(dispatcher) == (MINE, "block=64", "exact")


def test_anothers_exact_answer_for_an_own_implementation_stands(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[CLUSTER], block=64)
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "exact")


@pytest.mark.parametrize("where", [PROBLEM, fakes.problem(rows=2, hidden=512)], ids=["same", "other"])
@pytest.mark.parametrize("tier", [*TIERS, "cluster"])
def test_what_gave_wrong_results_here_is_taken_from_no_tier(tmp_path, tier, where):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    kind = {"exact": USER, "stale": USER, "near": USER, "cluster": CLUSTER}.get(tier, SHIPPED_TABLES)
    problem = fakes.problem(rows=2048) if tier in ("near", "shipped-near") else PROBLEM
    block = 32 if tier == "heuristic" else 64
    if tier != "heuristic":
        changes = {"triton": "3.1"} if tier == "stale" else {}
        record(stores[kind], H100 if tier == "sibling" else H200, problem, block=block, **changes)
    found = ("cuda:tiled", f"block={block}", "exact" if tier == "cluster" else tier)
    assert answer(dispatcher) == found
    stores[CLUSTER].record(H200, "affine", samples=[fakes.sample(where, block=block, status="wrong")])
    assert answer(dispatcher) == found, "another's finding"
    stores[USER].record(H200, "affine", samples=[fakes.sample(where, block=128, status="wrong")])
    assert answer(dispatcher) == found, "another config"
    stores[USER].record(H200, "affine", samples=[fakes.sample(where, block=block, status="wrong", source="0" * 12)])
    assert answer(dispatcher) == found, "another source"
    stores[USER].record(H200, "affine", samples=[fakes.sample(where, block=block, status="wrong")])
    decision, trace = ask(dispatcher)
    assert (decision.implementation.id, decision.config.text) != found[:2]
    assert "it gave wrong results on this device" in [c.reason for c in trace]
    # A pin is the user's own word, and a plan was made under the same rules.
    assert answer(dispatcher, pins=(("affine", "tiled", Config(block=block)),))[2] == "pinned"
    dispatcher.plan = Plan({(H200.fingerprint, PROBLEM): Choice("cuda:tiled", Config(block=block))})
    assert answer(dispatcher)[2] == "plan"


# --- plugins that can no longer be imported ---------------------------------------------------------------------------


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A module with a launch function, which is then broken by what it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.joinpath("some_launcher.py").write_text("import some_dependency_that_went\n\ndef run(): ...\n")
    source_hash.cache_clear()
    yield "some_launcher:run"
    sys.modules.pop("some_launcher", None)
    source_hash.cache_clear()
    _import.cache_clear()


@pytest.mark.parametrize("tier", TIERS)
def test_a_plugin_that_can_no_longer_be_imported_is_left_out(tmp_path, launched, tier):
    cat = fakes.catalog(mine(launch=launched), own=[] if tier == "heuristic" else [fakes.implementation("plain")])
    dispatcher, stores = fakes.dispatcher(tmp_path / "tables", cat=cat)
    source = {"source": source_hash(launched)}
    stores[USER].record(H200, "affine", samples=[fakes.sample(fakes.problem(hidden=512), MINE, 64, **source)])
    kind = USER if tier in ("exact", "stale", "near") else SHIPPED_TABLES
    problem = fakes.problem(rows=2048) if tier in ("near", "shipped-near") else PROBLEM
    if tier != "heuristic":
        entry = {**source, **({"source": "0" * 12} if tier == "stale" else {})}
        record(stores[kind], H100 if tier == "sibling" else H200, problem, implementation=MINE, block=64, **entry)
    with pytest.warns(PluginWarning, match="any:mine of affine is left out"):
        decision, trace = ask(dispatcher)
    assert decision.implementation.own
    assert ask(dispatcher)[0].implementation.own  # a second warning would be an error
    reason, *_ = [c.reason for c in trace if c.tier == tier and "cannot be imported" in c.reason]
    assert "some_dependency_that_went" in reason
    # Who names it hears of it.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinned = ask(dispatcher, pins=(("affine", "mine", None),))[0]
    with pytest.raises(PluginError):
        pinned.implementation.function()


def test_own_launch_functions_are_not_imported_to_decide(tmp_path):
    own = [fakes.implementation("late", launch="some_module_that_is_not_there:run")]
    dispatcher, _ = fakes.dispatcher(tmp_path, cat=fakes.catalog(own=own))
    assert answer(dispatcher) == ("any:late", "", "heuristic")


# --- several near entries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["near", "shipped-near", "sibling"])
def test_a_farther_entry_is_tried_where_the_nearest_is_not_legal(tmp_path, tier):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    store, device = stores[USER if tier == "near" else SHIPPED_TABLES], H100 if tier == "sibling" else H200
    for rows, block in ((2048, 7), (4096, 128), (8192, 64), (16384, 32)):
        record(store, device, fakes.problem(rows=rows), block=block)
    decision, trace = ask(dispatcher, budget=6400)
    assert (decision.source, decision.config.block) == (tier, 64)
    assert "rows=8192" in decision.detail
    assert [c.accepted for c in trace if c.tier == tier] == [False, False, True]


def test_not_every_entry_of_a_large_table_is_tried(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    stores[USER].record(H200, "affine", [fakes.stored(fakes.problem(rows=1 << n), block=7) for n in range(40)])
    _, trace = ask(dispatcher)
    assert [c.tier for c in trace].count("near") == 16


# --- protocols --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["exact", "near", "shipped", "shipped-near", "sibling"])
def test_what_was_measured_by_another_protocol_answers_nothing(tmp_path, tier):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    kind = USER if tier in ("exact", "near") else SHIPPED_TABLES
    device, problem = H100 if tier == "sibling" else H200, fakes.problem(rows=2048) if "near" in tier else PROBLEM
    right = fakes.stored(problem, block=64)
    others = [dataclasses.replace(right, protocol=p, choice=Choice("cuda:tiled", Config(block=128)))
              for p in ("cuda-events-0", "cuda-events-2", "cpu-clock-1")]  # fmt: skip
    stores[kind].record(device, "affine", others)
    assert answer(dispatcher)[2] == "heuristic"
    dispatcher.mode = "strict"
    with pytest.raises(StrictMissError) as caught:
        dispatcher.decide(PROBLEM, H200)
    assert "nearest entry" not in caught.value.why
    dispatcher.mode = "lookup"
    stores[kind].record(device, "affine", [right])
    assert answer(dispatcher) == ("cuda:tiled", "block=64", tier)


def test_a_pin_takes_no_config_that_was_measured_by_another_protocol(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    entry = dataclasses.replace(fakes.sample(PROBLEM, block=128, time_us=1.0), protocol="cpu-clock-1")
    stores[USER].record(H200, "affine", samples=[entry, fakes.sample(PROBLEM, block=64, time_us=9.0)])
    assert answer(dispatcher, pins=(("affine", "tiled", None),)) == ("cuda:tiled", "block=64", "pinned")


def test_verification_counts_whatever_the_protocol(tmp_path):
    for device, protocol in itertools.product((H200, CPU), ("cuda-events-1", "cpu-clock-1")):
        dispatcher, stores = fakes.dispatcher(tmp_path / protocol, cat=fakes.catalog(mine(), own=[]))
        entry = dataclasses.replace(fakes.sample(PROBLEM, MINE, 32), protocol=protocol)
        stores[USER].record(device, "affine", samples=[entry])
        assert answer(dispatcher, device=device) == (MINE, "block=32", "heuristic")
