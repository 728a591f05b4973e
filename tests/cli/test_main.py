"""The command as a whole: immediate help, exit codes, errors as text."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from liger_registry import errors
from liger_registry.cli import _errors

VERBS = (
    "warmup",
    "list",
    "explain",
    "verify",
    "compile",
    "export",
    "import",
    "merge",
    "prune",
    "plugins",
    "doctor",
    "report",
    "new-plugin",
)


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_help_imports_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "liger_registry.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    heavy = {"torch", "triton", "transformers", "numpy", "filelock", "platformdirs", "multiprocessing"}
    assert "liger_registry.cli.warmup" in imported
    assert not heavy & imported
    assert "Exit codes: 0 done; 1 something failed" in done.stdout.replace("\n ", "")
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_json_and_exit_codes(verb: str, tune: Callable[..., Any]) -> None:
    text = tune(verb, "--help").stdout
    assert "--json" in text
    assert "Exit codes" in text


@pytest.mark.parametrize("arguments", [("-h",), *((verb, "-h") for verb in VERBS)])
def test_h_is_help(arguments: tuple[str, ...], tune: Callable[..., Any]) -> None:
    assert tune(*arguments).stdout == tune(*arguments[:-1], "--help").stdout


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "liger_registry", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("liger-registry ")


def test_version(tune: Callable[..., Any]) -> None:
    from liger_registry import __version__

    assert tune("--version").stdout == f"liger-registry {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("list", "--nonsense"), ("export",), ("compile", "--sample", "x")]
)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...], tune: Callable[..., Any]) -> None:
    tune(*arguments, code=2)


@pytest.mark.parametrize("kind", sorted({*subclasses(errors.RegistryError)}, key=lambda kind: kind.__name__))
def test_every_error_has_a_documented_code(kind: type[errors.RegistryError]) -> None:
    code = _errors.exit_code(kind("what"))
    assert 1 <= code <= 5
    assert f"{code} " in _errors.EPILOG


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UnknownOpError, 2),
        (errors.ModelConfigError, 2),
        (errors.SettingError, 2),
        (errors.UnknownDeviceError, 2),
        (errors.CompileError, 1),
        (errors.VerificationError, 1),
        (errors.TableError, 3),
        (errors.TableInvalidError, 3),
        (errors.TuningBusyError, 4),
        (errors.TritonMissingError, 5),
        (errors.PluginError, 5),
    ],
)
def test_code_by_class(kind: type[errors.RegistryError], code: int) -> None:
    assert _errors.exit_code(kind("what")) == code


def test_an_error_is_text_on_stderr_without_a_traceback(tune: Callable[..., Any]) -> None:
    result = tune("explain", "no_such_op", code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: there is no operation 'no_such_op'\n  candidates: ")
    assert "\n  fix: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_setting_that_cannot_be_understood(tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_TUNE_MODE", "sometimes")
    assert "LIGER_TUNE_MODE" in tune("list", code=2).stderr


MANY = "9" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("prune", "--older-than", "9999y"),
        ("prune", "--older-than", "999999d"),
        ("prune", "--older-than", "2026-13-45"),
        ("prune", "--older-than", "0000-01-01"),
        ("prune", "--older-than", f"{MANY}d"),
        ("prune", "--older-than", "-1d"),
        ("prune", "--older-than", "nand"),
        ("warmup", "--batch", MANY),
        ("warmup", "--seq", MANY),
        ("warmup", "--batch", str(2**39), "--seq", str(2**39)),
        ("warmup", "--seq", "nan"),
        ("warmup", "--budget-s", MANY),
        ("warmup", "--budget-s", "inf"),
        ("warmup", "--budget-s", "-1"),
        ("warmup", "--budget-s", "-inf"),
        ("explain", "rms_norm", "--rows", MANY, "--hidden", "8"),
        ("explain", "rms_norm", "--dim", f"rows=8,hidden={MANY}"),
        ("explain", "rms_norm", "--rows", "8", "--hidden", "nan"),
        ("compile", "--sample", "-3"),
        ("compile", "--sample", "0"),
        ("compile", "--sample", MANY[:4000]),
        ("compile", "--processes", "-1"),
        ("compile", "--processes", "0"),
        ("compile", "--processes", MANY[:4000]),
        ("verify", "--configs", "0"),
        ("verify", "--configs", "-3"),
        ("verify", "--configs", MANY[:4000]),
        ("verify", "--seed", "-1"),
        ("verify", "--seed", MANY[:4000]),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_numbers_that_cannot_be_used(arguments: tuple[str, ...], tune: Callable[..., Any]) -> None:
    result = tune(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "\n  fix: " in result.stderr or "\n  candidates: " in result.stderr
    assert len(result.stderr) < 1000


@pytest.mark.parametrize("verb", ["warmup", "compile", "verify"])
@pytest.mark.parametrize("option", ["--budget-s", "--sample", "--processes", "--configs", "--seed"])
def test_numbers_that_the_parser_turns_down(verb: str, option: str, tune: Callable[..., Any]) -> None:
    for text in ("x", MANY):
        tune(verb, option, text, code=2)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["x", "-1", MANY, "1.5"])
def test_a_rank_that_is_no_number(
    name: str, value: str, tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    result = tune("warmup", "qwen3-0.6b", "--device", "cpu", "--seq", 8, "--budget-s", 1e-9, code=2)
    assert name in result.stderr


@pytest.mark.parametrize("value", ["9" * 400, MANY, "lots"])
def test_a_budget_that_is_no_size(value: str, tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", value)
    assert "LIGER_MEMORY_BUDGET" in tune("list", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("warmup", "m" * 5000), 2),
        (("import", "m" * 5000), 3),
        (("export", "m" * 5000), 3),
        (("merge", "m" * 5000, "-o", "x"), 3),
    ],
)
def test_a_name_that_is_too_long_for_a_path(arguments: tuple[str, ...], code: int, tune: Callable[..., Any]) -> None:
    assert tune(*arguments, code=code).stderr.startswith("error: ")


def test_warnings_of_this_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    _errors.show_warnings_as_lines()
    assert warnings.formatwarning(errors.TableWarning("a table"), errors.TableWarning, "f", 1) == "warning: a table\n"
    assert "f:1: UserWarning" in warnings.formatwarning(UserWarning("other"), UserWarning, "f", 1)


def test_the_installed_command_and_the_module_are_one(tmp_path: Path) -> None:
    by_module = subprocess.run(
        [sys.executable, "-m", "liger_registry.cli", "warmup", "--help"], capture_output=True, text=True, check=True
    )
    by_function = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from liger_registry.cli import main; sys.argv[1:] = ['warmup', '--help']; main()",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert by_module.stdout == by_function.stdout
    assert by_module.stdout.startswith("Usage: liger-tune warmup")
