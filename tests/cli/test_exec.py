"""``liger-tune exec``: what a command and its children see, and that nobody else sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liger_registry import drop_in
from liger_registry.errors import DropInError

SEEN = """
import importlib.metadata, importlib.util, json, os, sys
spec = importlib.util.find_spec("liger_kernel")
found = [d.version for d in importlib.metadata.distributions(name="liger_kernel")]
print(json.dumps({"path": os.environ.get("PYTHONPATH"), "args": sys.argv[1:], "origin": spec and spec.origin,
                  "versions": found, "pid": os.getpid()}))
"""


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def execute(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "liger_registry.cli", "exec", *command, **environment)


def seen(*command: object, **environment: str) -> dict[str, Any]:
    done = execute(*command, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory with another liger_kernel in it, as site-packages has one."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("")
    (tmp_path / "liger_kernel-0.5.2.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.5.2\n"
    (tmp_path / "liger_kernel-0.5.2.dist-info" / "METADATA").write_text(text)
    return tmp_path


def test_a_command_finds_ours_before_what_is_installed(installed: Path) -> None:
    code = (sys.executable, "-c", SEEN)
    ours = str(drop_in.directory() / "liger_kernel" / "__init__.py")
    found = seen("--", *code, PYTHONPATH=str(installed))
    assert (found["origin"], found["versions"][0]) == (ours, drop_in.VERSION)
    assert found["path"] == os.pathsep.join([str(drop_in.directory()), str(installed)])
    # Outside of the command nothing is changed.
    outside = json.loads(run(*code, PYTHONPATH=str(installed)).stdout)
    assert outside["origin"] == str(installed / "liger_kernel" / "__init__.py")
    assert outside["versions"] == ["0.5.2"]


def test_children_of_children_find_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # of the machine's own
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    found = seen("--", sys.executable, "-c", nested, SEEN)
    assert found["versions"] == [drop_in.VERSION]
    # And one exec in another is one.
    again = seen("--", sys.executable, "-m", "liger_registry.cli", "exec", sys.executable, "-c", SEEN)
    assert again["path"] == found["path"] == str(drop_in.directory())


def test_arguments_are_the_commands() -> None:
    """With and without the two dashes; options of the command are not ours."""
    options = ["--json", "-h", "--help", "--", "a b", "", "*", "--version"]
    for dashes in ([], ["--"]):
        assert seen(*dashes, sys.executable, "-c", SEEN, *options)["args"] == options


def test_the_exit_code_and_the_streams_are_the_commands() -> None:
    code = "import sys; print('out'); print('error', file=sys.stderr); sys.exit(7)"
    done = execute("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "error\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there a command is a child, not the process itself")
def test_the_command_is_the_process() -> None:
    """So that signals of a launcher reach it."""
    command = [sys.executable, "-m", "liger_registry.cli", "exec", "--", sys.executable, "-c", SEEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=120)
        assert json.loads(out)["pid"] == process.pid
    done = execute("--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == -signal.SIGTERM


def test_a_command_that_is_not_there(tune: Callable[..., Any]) -> None:
    done = tune("exec", "--", "no-such-command-at-all", code=2)
    assert "there is no command 'no-such-command-at-all'" in done.stderr
    assert "fix:" in done.stderr
    assert "Missing argument" in tune("exec", code=2).stderr
    assert "No such option" in tune("exec", "--json", "true", code=2).stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag: str, tune: Callable[..., Any]) -> None:
    text = tune("exec", flag).stdout
    assert "liger_kernel" in text
    assert "Exit codes" in text


def test_the_environment() -> None:
    ours, there = str(drop_in.directory()), {"PATH": "x"}
    for before, after in (
        (None, [ours]),
        ("", [ours]),
        ("a", [ours, "a"]),
        (os.pathsep.join(["a", ours, "b"]), [ours, "a", "b"]),
        (ours, [ours]),
        # An empty part is the working directory, in other company.
        (os.pathsep.join(["", "a"]), [ours, "", "a"]),
    ):
        given = there if before is None else {**there, "PYTHONPATH": before}
        assert drop_in.environment(given) == {**there, "PYTHONPATH": os.pathsep.join(after)}
        assert given == (there if before is None else {**there, "PYTHONPATH": before})


def test_a_directory_that_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_in, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(DropInError, match="holds no package liger_kernel"):
        drop_in.environment({})
    odd = tmp_path / f"a{os.pathsep}b"
    (odd / "site" / "liger_kernel").mkdir(parents=True)
    (odd / "site" / "liger_kernel" / "__init__.py").write_text("")
    monkeypatch.setattr(drop_in, "__file__", str(odd / "__init__.py"))
    with pytest.raises(DropInError, match="PYTHONPATH cannot name"):
        drop_in.directory()
