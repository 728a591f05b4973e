"""Configs are values that a table can name; a space contains exactly what it declares."""

from __future__ import annotations

import copy
import json
import pickle

import fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import Config, ConfigSpace
from liger_registry.config import Fields, is_nameable
from liger_registry.errors import ConfigOutsideSpaceError, InvalidSpaceError
from liger_registry.problem import scalar_fields

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)
FIELDS = st.dictionaries(NAMES, SCALARS, max_size=6)


@given(FIELDS)
def test_fields_survive_json_pickle_and_copy(values):
    fields = Fields(values)
    assert dict(fields) == values
    assert list(fields) == sorted(values)
    for again in (
        scalar_fields(json.loads(json.dumps(dict(fields))), "fields"),
        pickle.loads(pickle.dumps(fields)),
        copy.deepcopy(fields),
        Fields(dict(reversed(values.items()))),
    ):
        assert again == fields
        assert hash(again) == hash(fields)
        assert again.text == fields.text
        assert [type(v) for v in again.values()] == [type(v) for v in fields.values()]


@given(FIELDS, FIELDS)
def test_equal_fields_are_equal_in_type_too(one, two):
    def typed(values):
        return {name: (type(value), value) for name, value in values.items()}

    assert (Fields(one) == Fields(two)) is (typed(one) == typed(two))


@pytest.mark.parametrize(("one", "two"), [(1, True), (1, 1.0), (0, False), (0, 0.0), ("1", 1), (None, "None")])
def test_the_type_is_part_of_the_identity(one, two):
    assert Fields(a=one) != Fields(a=two)
    assert len({Fields(a=one), Fields(a=two)}) == 2


def test_fields_of_another_class_compare_by_value():
    assert Config(a=1) == Fields(a=1)
    assert Fields(a=1) != {"a": 1}
    assert type(pickle.loads(pickle.dumps(Config(a=1)))) is Config


def test_fields_cannot_be_changed():
    fields = Config(block=4, warps=8)
    for change in (
        lambda: setattr(fields, "block", 5),
        lambda: setattr(fields, "other", 5),
        lambda: setattr(fields, "_items", {}),
        lambda: fields.__setitem__("block", 5),
        lambda: delattr(fields, "block"),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    given_values = {"a": 1}
    taken = Fields(given_values)
    given_values["a"] = 2
    assert taken.a == 1
    assert fields.having(block=5).text == "block=5,warps=8"
    assert fields.without("block", "gone").text == "warps=8"
    assert fields.text == "block=4,warps=8"
    assert type(fields.having(a=1)) is Config


def test_attributes():
    fields = Fields(b=1, a=None)
    assert fields.b == 1
    assert fields.a is None
    with pytest.raises(AttributeError, match="no field 'c'; there are: a, b"):
        fields.c  # noqa: B018
    assert not hasattr(fields, "_private")
    assert repr(Config(a=1)) == "Config(a=1)"


# --- spaces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [], (), "48", 4, None, [4, 4], [object()], [[4]], [{}], [4, float("nan")], [float("inf")], {4, 8}, iter([4]),
        [2**63], [10**5000], ["\x1b[2J"], ["x" * 257], ["\ud800"], range(10**12), range(10**30), range(100_001),
    ],
)  # fmt: skip
def test_a_parameter_needs_values_that_a_table_can_name(values):
    with pytest.raises(InvalidSpaceError, match="'warps'"):
        ConfigSpace(warps=values)


@pytest.mark.parametrize(
    "parameters",
    [
        {f"p{n}": [1, 2] for n in range(17)},
        {f"p{n}": [1] for n in range(65)},
        {"one": range(317), "other": range(317)},
        {"a b": [1]},
        {"": [1]},
        {"x" * 65: [1]},
    ],
    ids=["combinations", "parameters", "product", "space", "empty", "long"],
)
def test_a_space_that_no_table_can_name_or_nobody_can_go_through(parameters):
    with pytest.raises(InvalidSpaceError):
        ConfigSpace(**parameters)


def test_values_of_different_types_are_different_values():
    space = ConfigSpace(a=[1, True, 1.0, "1", None])
    assert len(list(space.configs(None, None))) == 5
    assert Config(a=True) in space
    assert Config(a=False) not in space


def test_a_space_without_parameters_has_one_config():
    assert list(ConfigSpace().configs(None, None)) == [Config()]
    assert ConfigSpace().parse({}) == Config()
    assert {} not in ConfigSpace()


def test_configs_come_in_declared_order():
    space = ConfigSpace(warps=[8, 4], block=[2, 1])
    assert [c.text for c in space.configs(None, None)] == [
        "block=2,warps=8",
        "block=2,warps=4",
        "block=1,warps=8",
        "block=1,warps=4",
    ]


def test_constraints_narrow_and_say_why():
    wide, problem = ConfigSpace(block=[1, 2, 4]), fakes.problem(hidden=2)
    narrow = wide.where(lambda c, p, d: c.block <= p.hidden, "too wide").where(lambda c, p, d: d.units > c.block)
    assert len(list(wide.configs(problem, fakes.H200))) == 3
    assert [c.block for c in narrow.configs(problem, fakes.H200)] == [1, 2]
    assert narrow.why_illegal(Config(block=4), problem, fakes.H200) == "too wide"
    assert narrow.why_illegal(Config(block=1), problem, fakes.Device("cpu", "x86_64", "x", 1, 1, fakes.CPU.limits))
    assert narrow.why_illegal(Config(block=1), problem, fakes.H200) is None
    assert "not declared" in narrow.why_illegal(Config(block=3), problem, fakes.H200)
    # A constraint asks for a problem; membership is about what is declared.
    assert Config(block=4) in narrow


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block": 3},
        {"block": 1.0},
        {"block": True},
        {"block": "1"},
        {"block": [1]},
        {"block": {}},
        {"blok": 1},
        {"block": 1, "more": 1},
        {"block": None},
        {"block": float("nan")},
    ],
    ids=repr,
)
def test_parse_takes_nothing_else(fields):
    space = ConfigSpace(block=[1, 2])
    with pytest.raises(ConfigOutsideSpaceError) as caught:
        space.parse(fields)
    assert caught.value.why
    assert caught.value.candidates == ("block in [1, 2]",)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), st.lists(SCALARS, min_size=1, max_size=4))
def test_what_a_space_gives_it_takes_back(block, other):
    unique = list({(type(v), v): v for v in other if is_nameable(v)}.values()) or [None]
    space = ConfigSpace(block=block, other=unique)
    configs = list(space.configs(None, None))
    assert len(set(configs)) == len(block) * len(unique)
    for config in configs:
        assert space.parse(json.loads(json.dumps(dict(config)))) == config
