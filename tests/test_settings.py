"""The environment, read once and validated."""

from __future__ import annotations

import os

import pytest

from liger_registry.errors import SettingError, TableWarning
from liger_registry.settings import MODES, Settings, parse_bytes, parse_pins


def read(**environ):
    return Settings.from_environ({"LIGER_TUNE_CACHE_DIR": "/cache", **environ})


def test_defaults():
    settings = Settings.from_environ({})
    assert settings == Settings()
    assert settings.mode == "lookup"
    assert settings.cache_dir.name == "liger-registry"
    assert settings.table_dirs == ()
    assert settings.plugins is None
    assert settings.memory_budget is None
    assert (settings.interpret, settings.pins) == (False, ())


def test_the_process_environment_is_what_is_read(monkeypatch):
    monkeypatch.setenv("LIGER_TUNE_MODE", "strict")
    assert Settings.from_environ().mode == "strict"


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    assert read(LIGER_TUNE_MODE=mode).mode == mode


def test_an_empty_variable_is_an_unset_one():
    names = [
        "LIGER_TUNE_MODE",
        "LIGER_TUNE_TABLES",
        "LIGER_MEMORY_BUDGET",
        "LIGER_INTERPRET",
        "LIGER_PIN",
    ]
    assert read(**dict.fromkeys(names, "")) == read()


def test_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.joinpath("b").mkdir()
    settings = read(LIGER_TUNE_CACHE_DIR="~/x", LIGER_TUNE_TABLES=os.pathsep.join([str(tmp_path), "", "~/b"]))
    assert settings.cache_dir == tmp_path / "x"
    assert settings.table_dirs == (tmp_path, tmp_path / "b")


def test_a_directory_of_tables_that_is_not_there_is_a_warning(tmp_path):
    with pytest.warns(TableWarning, match=r"LIGER_TUNE_TABLES names .*gone") as caught:
        settings = read(LIGER_TUNE_TABLES=os.pathsep.join([str(tmp_path), str(tmp_path / "gone")]))
    assert len(caught) == 1
    assert len(settings.table_dirs) == 2


@pytest.mark.parametrize(
    ("text", "plugins"),
    [("", frozenset()), (" , ", frozenset()), ("a", frozenset({"a"})), ("a, B_c,,", frozenset({"a", "B_c"}))],
)
def test_plugins(text, plugins):
    assert read(LIGER_PLUGINS=text).plugins == plugins


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1610612736", 1610612736),
        ("1.5GiB", 1610612736),
        ("512M", 512 << 20),
        (" 2 kb ", 2048),
        ("1T", 1 << 40),
        ("10B", 10),
        ("3gib", 3 << 30),
        ("9007199254740993", 9007199254740993),
        ("0.5", 0),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count
    assert read(LIGER_MEMORY_BUDGET=text).memory_budget == count


@pytest.mark.parametrize(
    "text",
    [
        *("-1", "1e9", "GiB", "1 PiB", "1,5G", "nan", "inf", "0x10", "1GiBs", "12 M 3", "1."),
        *("\N{FULLWIDTH DIGIT ONE}", "9" * 400, "9" * 5000, "1." + "9" * 5000, "9" * 18 + "T"),
    ],
)
def test_what_is_no_size(text):
    with pytest.raises(SettingError, match=r"LIGER_MEMORY_BUDGET.* no size") as caught:
        read(LIGER_MEMORY_BUDGET=text)
    assert caught.value.fix
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), (" ON ", True), ("0", False), ("No", False)])
def test_switches(text, on):
    assert read(LIGER_INTERPRET=text).interpret is on
    assert read(LIGER_CHECK=text).check is on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGER_TUNE_MODE", "fast"),
        ("LIGER_TUNE_MODE", "STRICT"),
        ("LIGER_INTERPRET", "perhaps"),
        ("LIGER_PIN", "rms_norm"),
        ("LIGER_PIN", "=eager"),
        ("LIGER_PIN", "rms_norm="),
        ("LIGER_PIN", "rms_norm=eager;x"),
        ("LIGER_PIN", "rms_norm/sideways=eager"),
        ("LIGER_PIN", "rms_norm/=eager"),
        ("LIGER_PIN", "/forward=eager"),
        ("LIGER_TUNE_CACHE_DIR", "~no-such-user-here/x"),
        ("LIGER_TUNE_TABLES", "~no-such-user-here/x"),
    ],
)
def test_bad_values_are_named(name, value):
    with pytest.raises(SettingError) as caught:
        read(**{name: value})
    assert value.split(";")[-1].split("/x")[0] in str(caught.value)


def test_pins():
    assert parse_pins("") == ()
    assert parse_pins(" a=b ; a/backward = cuda:c;;") == (("a", "b"), ("a/backward", "cuda:c"))


def test_settings_are_values():
    assert hash(read(LIGER_PIN="a=b")) == hash(read(LIGER_PIN="a=b"))
    with pytest.raises(AttributeError):
        read().mode = "off"
