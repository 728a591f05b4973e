"""Why a choice was made: every tier, every candidate, and why each one lost."""

from __future__ import annotations

import dataclasses
import json

import fakes
import pytest

from liger_registry import Config
from liger_registry.decision import SHIPPED_TABLES, USER, Terms
from liger_registry.explain import Explanations, explain
from liger_registry.plan import Plan

H200, PROBLEM = fakes.H200, fakes.problem()


def table(explanation):
    return {(c.implementation, c.config): (c.verdict, c.reason) for c in explanation.candidates}


def test_an_untuned_choice(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path)
    found = explain(dispatcher, PROBLEM, H200)
    assert not found.hit
    assert [t.tier for t in found.tiers if t.accepted] == ["heuristic"]
    assert {t.reason for t in found.tiers if not t.accepted} == {"no answer"}
    assert table(found) == {
        ("cuda:tiled", "block=32"): ("chosen", "heuristic"),
        ("any:plain", ""): ("not measured", "run `liger-tune warmup`"),
        ("rocm:tiled", ""): ("rejected", "it is for rocm, the device is cuda"),
    }


def measured(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path, fakes.implementation("mine"))
    samples = [
        fakes.sample(PROBLEM, block=64, time_us=5.0),
        fakes.sample(PROBLEM, block=32, time_us=9.0),
        fakes.sample(PROBLEM, block=128, status="crash"),
        fakes.sample(PROBLEM, implementation="any:plain", block=None, time_us=7.0),
    ]
    stores[USER].record(H200, "affine", [fakes.stored(PROBLEM, block=64, time_us=5.0)], samples)
    return dispatcher, stores


def test_every_candidate_that_was_measured(tmp_path):
    dispatcher, _ = measured(tmp_path)
    found = explain(dispatcher, PROBLEM, H200)
    assert found.hit
    assert [t.tier for t in found.tiers] == ["pinned", "plan", "exact"]
    verdicts = table(found)
    assert verdicts["cuda:tiled", "block=64"] == ("chosen", "exact")
    assert verdicts["any:plain", ""][0] == "slower"
    assert verdicts["cuda:tiled", "block=128"] == ("rejected", "crash: ")
    assert verdicts["any:mine", ""][0] == "not measured"
    assert [c.time_us for c in found.candidates][:3] == [5.0, 7.0, 9.0]
    assert {c.distribution for c in found.candidates} == {"liger-registry", "a-plugin"}


def test_what_was_faster_but_not_legal_is_not_called_slower(tmp_path):
    dispatcher, _ = measured(tmp_path)
    found = explain(dispatcher, PROBLEM, H200, Terms(budget=3200))
    verdicts = table(found)
    assert verdicts["cuda:tiled", "block=64"] == (
        "rejected",
        "it needs 6,400 bytes beyond the outputs, the budget is 3,200",
    )
    assert not found.hit


def test_the_samples_of_the_nearest_problem_stand_in(tmp_path):
    dispatcher, _ = measured(tmp_path)
    found = explain(dispatcher, fakes.problem(rows=2048), H200)
    assert found.decision.source == "near"
    assert table(found)["any:plain", ""][0] == "slower"


def test_tiers_that_were_not_asked_are_not_said_to_have_no_answer(tmp_path):
    dispatcher, _ = measured(tmp_path)
    dispatcher.plan = Plan({})
    reasons = {t.tier: t.reason for t in explain(dispatcher, PROBLEM, H200).tiers}
    assert reasons["exact"] == reasons["sibling"] == "not asked"
    assert reasons["pinned"] == reasons["plan"] == "no answer"


def test_explaining_records_nothing(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path, mode="strict", on_miss=lambda *a: pytest.fail("recorded"))
    assert explain(dispatcher, PROBLEM, H200).decision.source == "heuristic"


def test_text_and_json(tmp_path):
    dispatcher, stores = measured(tmp_path)
    stores[SHIPPED_TABLES].record(H200, "affine", [fakes.stored(PROBLEM, block=7)])
    found = Explanations([explain(dispatcher, PROBLEM, H200)])
    text = str(found)
    assert PROBLEM.text in text
    assert "-> cuda:tiled(block=64) source=exact, user" in text
    assert "5 us" in text
    (data,) = json.loads(json.dumps(found.to_json()))
    assert data["decision"] == {
        "implementation": "cuda:tiled",
        "config": {"block": 64},
        "source": "exact",
        "detail": "user",
        "hit": True,
    }
    assert data["device"] == H200.fingerprint
    assert len(data["candidates"]) == len(found[0].candidates)


def test_pins_are_explained(tmp_path):
    dispatcher, _ = measured(tmp_path)
    found = explain(dispatcher, PROBLEM, H200, Terms((("affine", "plain", Config()),)))
    assert table(found)["any:plain", ""] == ("chosen", "pinned")
    assert table(found)["cuda:tiled", "block=64"][0] == "passed over"


def planted(*arguments):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("fields", "config", "reason"),
    [
        ({"heuristic": planted}, "", "its heuristic raised ZeroDivisionError: planted"),
        ({"heuristic": lambda p, d: None}, "", "its heuristic gave None, which is no Config"),
        ({"heuristic": lambda p, d: {"block": 32}}, "", "its heuristic gave {'block': 32}, which is no Config"),
        ({"space": fakes.SPACE.where(planted)}, "block=32", "its space raised ZeroDivisionError: planted"),
        ({"extra_bytes": planted}, "block=32", "its extra_bytes raised ZeroDivisionError: planted"),
    ],
)
def test_a_plugin_whose_own_functions_fail_is_rejected_with_the_reason(tmp_path, fields, config, reason):
    plugin = dataclasses.replace(fakes.tiled(vendor="any"), name="bad", **fields)
    dispatcher, _ = fakes.dispatcher(tmp_path, plugin)
    found = explain(dispatcher, PROBLEM, H200, Terms(budget=10**6))
    assert table(found)["any:bad", config] == ("rejected", reason)
    assert found.decision.implementation.own


def test_samples_of_another_protocol_explain_nothing(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    other = dataclasses.replace(fakes.sample(PROBLEM, block=64, time_us=5.0), protocol="cpu-clock-1")
    far = dataclasses.replace(fakes.stored(fakes.problem(rows=2048)), protocol="cpu-clock-1")
    stores[USER].record(H200, "affine", [far], [other])
    assert {c.time_us for c in explain(dispatcher, PROBLEM, H200).candidates} == {None}


def test_the_nearest_problem_that_has_samples_stands_in(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    near, far = fakes.problem(rows=2048), fakes.problem(rows=8192)
    stores[USER].record(H200, "affine", [fakes.stored(p) for p in (near, far)], [fakes.sample(far, time_us=5.0)])
    assert 5.0 in {c.time_us for c in explain(dispatcher, PROBLEM, H200).candidates}


def test_a_faster_candidate_that_was_not_chosen_says_why(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    samples = [fakes.sample(PROBLEM, block=64, time_us=5.0), fakes.sample(PROBLEM, block=32, time_us=4.95)]
    samples.append(fakes.sample(PROBLEM, block=128, time_us=10.0))
    stores[USER].record(H200, "affine", [fakes.stored(PROBLEM, block=64, time_us=5.0)], samples)
    found = explain(dispatcher, PROBLEM, H200)
    assert table(found)["cuda:tiled", "block=32"] == (
        "not proven",
        "1.0% faster, no more than the noise: the choice stays",
    )
    assert table(found)["cuda:tiled", "block=128"] == ("slower", "2.00 x the chosen one's time")
