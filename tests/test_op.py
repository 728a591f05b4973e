"""Contracts: how calls are bound, which options are taken, and what enters the problem key."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import fakes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_registry.config import Fields
from liger_registry.errors import (
    DeviceMismatchError,
    InvalidInputError,
    RegistrationError,
    UnsupportedDtypeError,
    UnsupportedOptionError,
)
from liger_registry.op import Description, Input, Option, Scheme, check_dtype, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, SCHEME, bucket

OP = fakes.make_op()
X, W = torch.ones(3, 4), torch.ones(4)


def test_bind_fills_in_defaults_in_the_contracts_order():
    tensors, options = OP.bind((X,), {})
    assert tensors == (X, None)
    assert options == {"gain": 1.0, "style": "plain", "steps": 1, "exact": False}
    tensors, options = OP.bind((X, W, 2), {"style": "fancy"})
    assert tensors[1] is W
    assert list(options) == ["gain", "style", "steps", "exact"]
    assert type(options["gain"]) is float
    assert OP.bind((), {"w": W, "x": X})[0] == (X, W)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((X, W, 1.0, "plain", 1, False, 7), {}), ((X,), {"x": X}), ((X,), {"gian": 2.0})]
)
def test_a_call_that_does_not_fit(args, kwargs):
    with pytest.raises(UnsupportedOptionError) as caught:
        OP.bind(args, kwargs)
    assert "affine(x, w=None, gain=1.0" in caught.value.fix
    assert {"x", "w", "gain"} <= set(caught.value.candidates)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("x", [None, 3, [1.0], "x"])
def test_inputs_are_tensors(x):
    with pytest.raises(InvalidInputError, match=r"x of affine is (no tensor|missing)"):
        OP.bind((x,), {})
    with pytest.raises(InvalidInputError, match="w of affine"):
        OP.bind((X, "w"), {})


def test_tensors_on_two_devices():
    with pytest.raises(DeviceMismatchError, match="x on cpu, w on meta"):
        OP.bind((X, W.to("meta")), {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gain", "1"),
        ("gain", None),
        ("gain", True),
        ("gain", float("nan")),
        ("gain", -1e-9),
        ("gain", 10**400),
        ("style", "Plain"),
        ("style", 1),
        ("style", None),
        ("steps", 1.0),
        ("steps", True),
        ("steps", 0),
        ("exact", 1),
        ("exact", None),
    ],
)
def test_options_that_are_refused(name, value):
    with pytest.raises(UnsupportedOptionError) as caught:
        OP.bind((X,), {name: value})
    assert f"option {name!r} of affine" in caught.value.what
    assert caught.value.candidates


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_float_option_takes_nan_or_infinity(value):
    with pytest.raises(UnsupportedOptionError, match="NaN and infinity are no values"):
        Option("shift", float, 0.0).validate("op", value)


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_numbers_pass_unchanged(value):
    assert OP.bind((X,), {"gain": value})[1]["gain"] == value


# --- problem keys -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_only_buckets_are_rounded(rows, hidden):
    key = OP.problem(Description(Fields(rows=rows, hidden=hidden), Fields(x="float32"), Fields()), FORWARD, "default")
    assert (key.rows, key.hidden) == (bucket(rows), hidden)
    assert dict(key.flags) == {}


def test_which_gradients_are_needed_is_part_of_backward_alone():
    call = Description(Fields(rows=5, hidden=4), Fields(x="float32", w="none"), Fields(style="plain"))
    keys = [OP.problem(call, BACKWARD, "default", needs) for needs in ((True, True), (True, False), (False, True))]
    assert [k.needs for k in keys] == ["x,w", "x", "w"]
    assert [OP.needs(k) for k in keys] == [(True, True), (True, False), (False, True)]
    assert "needs" not in OP.problem(call, FORWARD, "default", (True, True)).flags
    assert OP.needs(OP.problem(call, FORWARD, "default")) == (False, False)
    chosen = OP.problem(call, SCHEME, "default", (True, False))
    assert (chosen.scheme, chosen.needs) == ("", "x")
    with pytest.raises(ValueError, match="shorter"):
        OP.problem(call, BACKWARD, "default", (True,))


@pytest.mark.parametrize(
    ("budget", "flag"),
    [(0, 1), (1, 1), (7, 7), (9, 8), (1 << 30, 1 << 30), ((1 << 31) - 1, 7 << 28), (300, 256), (330, 320)],
)
def test_the_budget_enters_as_its_class_rounded_down(budget, flag):
    call = Description(Fields(rows=5, hidden=4), Fields(), Fields())
    assert OP.problem(call, FORWARD, "default", budget=budget).budget == flag
    assert "budget" not in OP.problem(call, FORWARD, "default").flags


def test_options_of_a_problem():
    wanted = fakes.problem()
    fancy = replace(wanted, flags=wanted.flags.having(style="fancy"))
    assert OP.options_of(fancy) == {"gain": 1.0, "style": "fancy", "steps": 1, "exact": False}


def test_a_contract_knows_its_problems():
    wanted = fakes.problem()
    assert OP.has(wanted)
    assert OP.has(fakes.problem(phase=BACKWARD))
    for other in (
        fakes.Problem("other", "default", FORWARD, wanted.dims, wanted.dtypes, wanted.flags),
        fakes.Problem("affine", "gone", FORWARD, wanted.dims, wanted.dtypes, wanted.flags),
        fakes.Problem("affine", "", SCHEME, wanted.dims, wanted.dtypes, wanted.flags),
        fakes.Problem("affine", "default", FORWARD, Fields(rows=1), wanted.dtypes, wanted.flags),
    ):
        assert not OP.has(other)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("dtypes", {"x": "bfloat16"}),
        ("dtypes", {"x": "bfloat16", "w": "bfloat16", "z": "bfloat16"}),
        ("dtypes", {"x": "bfloat16", "v": "bfloat16"}),
        ("dtypes", {"x": "none", "w": "bfloat16"}),
        ("dtypes", {"x": "bf16", "w": "bfloat16"}),
        ("dtypes", {"x": "half", "w": "bfloat16"}),
        ("dtypes", {"x": "nn", "w": "bfloat16"}),
        ("dtypes", {"x": "", "w": "bfloat16"}),
        ("dtypes", {"x": "__name__", "w": "none"}),
        ("dims", {"rows": 1000, "hidden": 256}),
        ("dims", {"rows": 1 << 62, "hidden": (1 << 62) + 1}),
        ("dims", {"rows": True, "hidden": 256}),
        ("flags", {}),
        ("flags", {"style": "odd"}),
        ("flags", {"style": 1}),
        ("flags", {"style": None}),
        ("flags", {"style": "plain", "exact": False}),
        ("flags", {"style": "plain", "casting": "llama"}),
        ("flags", {"style": "plain", "needs": "x"}),
        ("flags", {"style": "plain", "budget": 1024}),
    ],
    ids=str,
)
def test_what_no_call_can_be(part, fields):
    assert not OP.has(replace(fakes.problem(), **{part: Fields(fields)}))


@pytest.mark.parametrize("needs", ["y", "w,x", "x,w,", "x,x", None, 1])
def test_needs_that_no_backward_has(needs):
    assert not OP.has(fakes.problem(phase=BACKWARD, needs=needs))
    assert all(OP.has(fakes.problem(phase=BACKWARD, needs=right)) for right in ("x", "w", "x,w"))


def test_a_backward_names_what_it_needs():
    wanted = fakes.problem(phase=BACKWARD)
    assert not OP.has(replace(wanted, flags=wanted.flags.without("needs")))


@pytest.mark.parametrize("dtypes", [{"x": "float64", "w": "none"}, {"x": "float16", "w": "float32"}])
def test_what_a_call_can_be(dtypes):
    wanted = fakes.problem()
    assert OP.has(replace(wanted, dtypes=Fields(dtypes), flags=wanted.flags.having(style="fancy")))


def test_the_budget_is_in_the_key_where_the_contract_declares_one():
    op = fakes.make_op(budget=lambda problem: 5000)
    assert not op.has(fakes.problem())
    assert op.has(fakes.problem(budget=4096))
    for wrong in (5000, 0, -4096, True, "4096", 4096.0, None):
        assert not op.has(fakes.problem(budget=wrong)), wrong


@pytest.mark.parametrize("part", ["example", "describe", "validate", "budget"])
def test_whatever_a_contracts_functions_raise_is_no(part):
    def broken(*arguments):
        raise RuntimeError("planted")

    assert not fakes.make_op(**{part: broken}).has(fakes.problem())


def test_every_problem_of_every_model_is_one():
    from liger_registry import registry
    from liger_registry.architecture import PRESETS
    from liger_registry.cli._problems import model_problems

    found = model_problems(registry.catalog, list(PRESETS.values()), [512], dtypes=["bfloat16", "float32"])
    assert found
    assert [p.text for p in found if not registry.op(p.op).has(p)] == []


def test_schemes_by_name():
    assert OP.scheme("default") is OP.schemes[0]
    with pytest.raises(LookupError, match="no scheme 'other'"):
        OP.scheme("other")
    assert OP.differentiable == ("x", "w")


# --- contracts that contradict themselves -----------------------------------------------------------------------------


def with_default(gain):
    def reference(x, w=None, gain=gain, style="plain", steps=1, exact=False):
        return fakes.reference(x, w, gain, style, steps, exact)

    return reference


def test_a_sound_contract_passes():
    OP.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "no name"},
        {"name": "../escape"},
        {"reference": lambda x, w=None: None},
        {"reference": lambda w=None, x=None, gain=1.0, style="plain", steps=1, exact=False: None},
        {"reference": with_default(2.0)},
        {"schemes": ()},
        {"order": {FORWARD: ()}},
        {"inputs": (Input("x"), Input("needs"))},
        {"options": (Option("device", str, "cpu"),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_contract_that_contradicts_itself(changes):
    with pytest.raises(RegistrationError):
        fakes.make_op(**changes).check()


def test_dtypes():
    assert dtype_name(None) == "none"
    assert dtype_name(X.bfloat16()) == "bfloat16"
    check_dtype("op", X, ("float32",), "x")
    with pytest.raises(UnsupportedDtypeError, match="x of dtype int64") as caught:
        check_dtype("op", X.long(), ("float32",), "x")
    assert isinstance(caught.value, TypeError)


def test_contracts_are_immutable_and_slotted():
    for kind in (type(OP), Input, Option, Scheme, Description):
        assert "__dict__" not in dir(kind)
        assert inspect.getdoc(kind)
    with pytest.raises(AttributeError):
        OP.name = "other"
