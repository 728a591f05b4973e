"""``liger-tune new-plugin``: what it writes installs, conforms, compiles, and is tuned against all others."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liger_registry import new_plugin
from liger_registry.errors import RegistrationError, TableError, UnsupportedOptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NAME = "fast-thing"


@pytest.mark.parametrize("op", new_plugin.KERNELS)
def test_its_files(op: str) -> None:
    made = new_plugin.files_of(NAME, op)
    assert {*made} == {path.format(package="fast_thing") for path in new_plugin.FILES}
    for path, text in made.items():
        assert "tmpl" not in path
        # What is left of a placeholder would be a bare $; a workflow has ${{ }} of its own.
        assert not re.search(r"\$(?!\{\{)", text), path
        if path.endswith(".py"):
            assert ast.get_docstring(ast.parse(text))
    project = tomllib.loads(made["pyproject.toml"])
    assert project["project"]["name"] == NAME
    assert project["project"]["license"] == "Apache-2.0"
    assert project["project"]["entry-points"]["liger_registry.kernels"] == {"fast_thing": "fast_thing:register"}
    assert made["LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert f'op="{op}"' in made["fast_thing/__init__.py"]


@pytest.mark.parametrize("op", new_plugin.KERNELS)
def test_its_code_is_clean(op: str, tmp_path: Path) -> None:
    new_plugin.write(NAME, op, tmp_path)
    for command in (("check", "--select", "B,E,F,I,RUF,SIM,UP,W"), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tmp_path / NAME,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout


def test_its_workflow_is_yaml_that_runs_both_suites() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(new_plugin.files_of(NAME)[".github/workflows/tests.yml"])
    runs = [step["run"] for step in found["jobs"]["tests"]["steps"] if "run" in step]
    assert runs[1:3] == ["pytest", "TRITON_INTERPRET=1 pytest"]
    assert "--op rms_norm" in runs[3]


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("Fast_Thing", ("fast-thing",)),
        ("fast--thing", ("fast-thing",)),
        ("../evil", ("evil",)),
        ("9lives", ("lives",)),
        ("", ()),
        ("-", ()),
        ("a" * 61, ("a" * 60,)),
        ("x y", ("x-y",)),
        ("fast-thing\n", ("fast-thing",)),
        ("class", ()),
        ("json", ()),
        ("torch", ()),
        ("liger-registry", ()),
        ("liger-registry-mine", ()),
    ],
)
def test_names_that_are_none(name: str, candidate: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="is no name for a plugin") as caught:
        new_plugin.write(name, "rms_norm", tmp_path)
    assert caught.value.candidates == candidate
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


def test_operations_without_a_kernel(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match="no kernel of rope") as caught:
        new_plugin.write(NAME, "rope", tmp_path)
    assert caught.value.candidates == tuple(new_plugin.KERNELS)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(TableError, match="is there already"):
        new_plugin.write(NAME, "rms_norm", tmp_path)
    (tmp_path / NAME).unlink()
    new_plugin.write(NAME, "rms_norm", tmp_path)
    mine = tmp_path / NAME / "README.md"
    mine.write_text("mine")
    with pytest.raises(TableError, match="is there already"):
        new_plugin.write(NAME, "rms_norm", tmp_path)
    assert mine.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(TableError, match="cannot be written") as caught:
        new_plugin.write(NAME, "rms_norm", tmp_path)
    assert caught.value.why == "No space left on device"
    assert not list(tmp_path.iterdir())


def test_the_verb(tune: Callable[..., Any], tune_json: Callable[..., Any], tmp_path: Path) -> None:
    said = tune("new-plugin", NAME, "--directory", tmp_path).stdout
    assert str(tmp_path / NAME / "fast_thing" / "kernel.py") in said
    assert "liger-tune warmup --op rms_norm" in said
    found = tune_json("new-plugin", "other-thing", "--op", "softmax", "--directory", tmp_path / "deep" / "er")
    assert found["directory"] == str(tmp_path / "deep" / "er" / "other-thing")
    assert all(Path(path).is_file() for path in found["files"])
    assert "is there already" in tune("new-plugin", NAME, "--directory", tmp_path, code=3).output
    assert "is no name for a plugin" in tune("new-plugin", "No", "--directory", tmp_path, code=2).output
    assert "candidates: rms_norm" in tune("new-plugin", "x", "--op", "y", "--directory", tmp_path, code=2).output


# -- installed ---------------------------------------------------------------------------------------------------------

SIZES = {"rms_norm": {"rows": 64, "hidden": 256}, "softmax": {"rows": 64, "width": 256}}
SIZES["relu_squared"] = SIZES["softmax"]
MARKS = {"rms_norm": pytest.mark.ci}


@pytest.fixture(
    scope="module", params=[pytest.param(op, marks=MARKS.get(op, pytest.mark.slow)) for op in new_plugin.KERNELS]
)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """The operation, the plugin's directory, and a directory that it is installed into."""
    place = tmp_path_factory.mktemp("plugin")
    new_plugin.write(NAME, request.param, place)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(place / "site"), str(place / NAME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return request.param, place / NAME, place / "site"


def environ(site: Path, cache: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(site),
        "LIGER_TUNE_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        # Tuners of one machine wait for each other here.
        "TMPDIR": str(site.parent),
        **more,
    }


def run_tests(plugin: Path, *arguments: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=plugin, env=env, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_its_own_tests_pass(installed: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, plugin, site = installed
    assert re.search(r"\b[3-9]\d passed", run_tests(plugin, env=environ(site, tmp_path)))


@pytest.mark.slow
def test_its_kernel_conforms_in_the_interpreter(installed: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, plugin, site = installed
    env = environ(site, tmp_path, TRITON_INTERPRET="1")
    assert re.search(r"\b[3-9]\d passed", run_tests(plugin, "tests/test_conformance.py", env=env))


TUNE = """
    import json, sys
    from liger_registry import Device, registry
    from liger_registry.config import Fields
    from liger_registry.problem import Problem

    def main():
        op, sizes = sys.argv[1], json.loads(sys.argv[2])
        dtypes = {"x": "float32", "weight": "float32"} if op == "rms_norm" else {"x": "float32"}
        flags = {"casting": "llama"} if op == "rms_norm" else {}
        problem = Problem(op, "default", "forward", Fields(sizes), Fields(dtypes), Fields(flags))
        registry.tune([problem])
        device = Device.parse("cpu")
        found = registry.explain(problem, device)
        table = registry.user_store.load(device, op)
        print(json.dumps({
            "samples": {s.choice.implementation: s.status for s in table.samples_of(problem)},
            "times": {c.implementation: c.time_us for c in found.candidates if c.time_us is not None},
            "chosen": found.decision.implementation.id,
            "source": found.decision.source,
            "kernel": next(c.reason for c in found.candidates if c.implementation == "cuda:fast_thing_triton"),
        }))

    if __name__ == "__main__":
        main()
"""


def test_it_is_tuned_and_wins_or_loses(installed: tuple[str, Path, Path], tmp_path: Path) -> None:
    op, _, site = installed
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TUNE))
    done = subprocess.run(
        [sys.executable, str(script), op, json.dumps(SIZES[op])],
        env=environ(site, tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["samples"]["any:fast_thing_torch"] in ("ok", "noisy"), found
    assert found["source"] == "exact"
    assert found["chosen"] in found["times"]
    assert found["times"]["any:fast_thing_torch"] > 0
    assert found["kernel"] == "it is for cuda, the device is cpu"


@pytest.mark.slow
def test_its_configs_compile_and_fit(installed: tuple[str, Path, Path], tmp_path: Path) -> None:
    op, _, site = installed
    arguments = ("qwen3-0.6b", "--op", op, "--device", "a100,mi300x", "--sample", "24", "--processes", "1", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "liger_registry", "compile", *arguments],
        env=environ(site, tmp_path),
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    ours = [row for row in json.loads(done.stdout) if "fast_thing_triton" in json.dumps(row)]
    assert {row["device"].split("/")[0] for row in ours} == {"cuda", "rocm"}
    assert not [row for row in ours if row["error"]]
