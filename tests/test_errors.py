"""Errors say what happened and the way out, are the builtin a caller would catch, and cross process borders."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from liger_registry import errors

ERRORS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.RegistryError)]
BUILTINS = {
    "UnknownOpError": LookupError,
    "UnknownImplementationError": LookupError,
    "UnknownDeviceError": ValueError,
    "UnsupportedDtypeError": TypeError,
    "UnsupportedOptionError": ValueError,
    "InvalidInputError": ValueError,
    "DeviceMismatchError": ValueError,
    "InvalidSpaceError": ValueError,
    "ConfigOutsideSpaceError": ValueError,
    "RegistrationError": ValueError,
    "RegistrationClashError": ValueError,
    "PluginError": RuntimeError,
    "NoImplementationError": RuntimeError,
    "StrictMissError": LookupError,
    "TableError": OSError,
    "TableInvalidError": ValueError,
    "PlanError": ValueError,
    "TuningBusyError": RuntimeError,
    "MeasurementError": RuntimeError,
    "VerificationError": AssertionError,
    "CompileError": RuntimeError,
    "ModelConfigError": ValueError,
    "SettingError": ValueError,
    "TritonMissingError": ImportError,
    "ExtraMissingError": ImportError,
    "UnsupportedTransformError": RuntimeError,
    "UnsupportedShardingError": NotImplementedError,
    "AdapterError": ValueError,
    "LateReadError": RuntimeError,
    "DropInError": RuntimeError,
    "NotOfferedError": AttributeError,
    "NotOfferedImportError": ImportError,
}


def test_the_list_above_is_complete():
    assert {c.__name__ for c in ERRORS} == {"RegistryError", *BUILTINS}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda c: c.__name__)
def test_every_class(kind):
    assert issubclass(kind, BUILTINS.get(kind.__name__, Exception))
    assert kind.__doc__
    error = kind("what", why="why", candidates=(c for c in ("a", 2)), fix="fix")
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is kind
        assert (again.what, again.why, again.candidates, again.fix) == ("what", "why", ("a", "2"), "fix")
        assert str(again) == str(error) == "what\n  why: why\n  candidates: a, 2\n  fix: fix"


@pytest.mark.parametrize("kind", ERRORS, ids=lambda c: c.__name__)
def test_the_text_has_a_line_for_what_was_given(kind):
    assert str(kind("what")) == "what"
    assert str(kind("what", fix="fix")) == "what\n  fix: fix"
    with pytest.raises(kind, match=r"^what$"):
        raise kind("what")


def test_notes_and_causes_survive_raising():
    def fill():
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise errors.TableError("full", why=str(error)) from error

    with pytest.raises(errors.TableError) as caught:
        fill()
    assert isinstance(caught.value.__cause__, OSError)
    assert "No space left" in str(caught.value)


def test_warnings_have_one_base():
    kinds = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Warning)]
    assert len(kinds) == 4
    assert all(issubclass(c, errors.RegistryWarning) and issubclass(c, UserWarning) for c in kinds)
