"""Problem keys: log2 buckets, a canonical text, and JSON that is trusted with nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle

import fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import Problem
from liger_registry.config import Fields
from liger_registry.errors import TableInvalidError
from liger_registry.problem import PHASES, bucket, budget_class, budget_for, scalar_fields

COUNTS = st.integers(0, 2**62)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)
PROBLEMS = st.builds(
    Problem,
    st.just("op"),
    NAMES,
    st.sampled_from(PHASES),
    st.dictionaries(NAMES, st.integers(1, 2**63 - 1), max_size=4).map(Fields),
    st.dictionaries(NAMES, st.text(max_size=9), max_size=4).map(Fields),
    st.dictionaries(NAMES, st.one_of(st.booleans(), st.integers(), st.text(max_size=9)), max_size=4).map(Fields),
)


@given(COUNTS)
def test_a_bucket_is_the_next_power_of_two(count):
    upper = bucket(count)
    assert upper >= max(count, 1)
    assert upper & (upper - 1) == 0
    assert upper == 1 or upper // 2 < count
    assert bucket(upper) == upper


@given(COUNTS, COUNTS)
def test_buckets_are_monotonic(one, two):
    assert (bucket(one) <= bucket(two)) or one > two


@pytest.mark.parametrize(("count", "upper"), [(0, 1), (1, 1), (2, 2), (3, 4), (16384, 16384), (16385, 32768)])
def test_buckets_by_hand(count, upper):
    assert bucket(count) == upper


@given(st.integers(1, 2**40))
def test_a_default_budget_is_a_class_that_holds_it_and_little_more(cost):
    budget = budget_for(cost)
    assert cost <= budget == budget_class(budget)
    assert budget < cost + max(cost // 4, 1)


def test_default_budgets_by_hand():
    assert [budget_for(n) for n in (0, 1, 5, 256, 257, 700)] == [1, 1, 5, 256, 320, 768]


def test_twenty_lengths_fall_into_few_buckets():
    lengths = range(1000, 9000, 400)
    assert len({bucket(n) for n in lengths}) <= math.log2(9000 / 1000) + 2


@given(PROBLEMS)
def test_problems_survive_json_and_pickle(problem):
    again = Problem.from_json("op", json.loads(json.dumps(problem.to_json())))
    for other in (again, pickle.loads(pickle.dumps(problem)), copy.deepcopy(problem)):
        assert other == problem
        assert hash(other) == hash(problem)
        assert other.text == problem.text


def test_text_and_attributes():
    problem = fakes.problem(rows=16, needs="x")
    assert problem.text == "affine/default/forward hidden=256,rows=16 w=bfloat16,x=bfloat16 needs=x,style=plain"
    assert (problem.rows, problem.hidden, problem.style) == (16, 256, "plain")
    assert problem.having(rows=32).rows == 32
    assert problem.rows == 16
    with pytest.raises(AttributeError, match="problem of affine has no field 'vocab'; there are: hidden, rows"):
        problem.vocab  # noqa: B018
    assert not hasattr(problem, "__fields__")
    assert Problem("op", "", "scheme", Fields(), Fields(), Fields()).text == "op/*/scheme"
    with pytest.raises(AttributeError):
        problem.op = "other"


def entry(**changes):
    return {**fakes.problem().to_json(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": None},
        {"scheme": 3},
        {"phase": "sideways"},
        {"phase": None},
        {"phase": ["forward"]},
        {"dims": None},
        {"dims": []},
        {"dims": {"rows": 0}},
        {"dims": {"rows": -4}},
        {"dims": {"rows": 2**63}},
        {"dims": {"rows": True}},
        {"dims": {"rows": 4.0}},
        {"dims": {"rows": "4"}},
        {"dims": {"rows": None}},
        {"dims": {"rows": [4]}},
        {"dims": {"__class__.x": 4}},
        {"dims": {"": 4}},
        {"dims": {"a b": 4}},
        {"dims": {"a" * 65: 4}},
        {"dims": {f"a{n}": 4 for n in range(65)}},
        {"dtypes": {"x": 16}},
        {"dtypes": {"x": None}},
        {"dtypes": {"x": "b" * 257}},
        {"dtypes": "bfloat16"},
        {"flags": {"a": {}}},
        {"flags": {"a": float("nan")}},
        {"flags": {"a": float("inf")}},
        {"flags": {1: 1}},
        {"flags": 1},
    ],
    ids=lambda changes: repr(changes)[:50],
)
def test_hostile_json(changes):
    with pytest.raises(TableInvalidError) as caught:
        Problem.from_json("affine", entry(**changes))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["scheme", "phase", "dims", "dtypes", "flags"])
def test_missing_fields(name):
    fields = entry()
    del fields[name]
    with pytest.raises(TableInvalidError):
        Problem.from_json("affine", fields)


def test_scalar_fields_names_what_is_wrong():
    with pytest.raises(TableInvalidError, match=r"flags\.deep is no JSON scalar"):
        scalar_fields({"deep": [[[]]]}, "flags")
