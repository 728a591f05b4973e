"""What the run under a sanitizer (tests/gpu/sanitize.py) makes of a tool's output, with tools that are scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import sanitize
import sanitized

CHILD = 'SANITIZED {"calls": 3, "wrong": []}'
HEAD = "========= COMPUTE-SANITIZER\n"
RACES = "========= RACECHECK SUMMARY:"


@pytest.mark.parametrize(
    ("output", "status", "errors"),
    [
        (f"{HEAD}{CHILD}\n========= ERROR SUMMARY: 0 errors\n", sanitize.CLEAN, 0),
        (f"{HEAD}{CHILD}\n{RACES} 0 hazards displayed (0 errors, 0 warnings)\n", sanitize.CLEAN, 0),
        (f"{HEAD}========= Invalid __global__ write of size 4 bytes\n{CHILD}\n========= ERROR SUMMARY: 1 error\n",
         sanitize.REPORTED, 1),
        (f"{HEAD}{CHILD}\n{RACES} 2 hazards displayed (0 errors, 2 warnings)\n",
         sanitize.REPORTED, 2),
        # What was reported counts, whatever became of the process.
        (f"{HEAD}Traceback\n========= ERROR SUMMARY: 7 errors\n", sanitize.REPORTED, 7),
        (f"{HEAD}========= Error: Device not supported. Please refer to the documentation\n", sanitize.NOT_RUN, None),
        (f"{HEAD}Killed\n", sanitize.NOT_RUN, None),
        (f"{HEAD}{CHILD}\n", sanitize.FAILED, None),
        (f"{HEAD}Traceback\nValueError\n========= ERROR SUMMARY: 0 errors\n", sanitize.FAILED, 0),
        (f'{HEAD}SANITIZED {{"calls": 3, "wrong": ["y"]}}\n========= ERROR SUMMARY: 0 errors\n', sanitize.FAILED, 0),
        (f'{HEAD}SANITIZED {{"calls": 3, "wrong": [], "left": ["rope"]}}\n========= ERROR SUMMARY: 0 errors\n',
         sanitize.NOT_RUN, 0),
    ],
)  # fmt: skip
def test_what_is_read(output: str, status: str, errors: int | None):
    found = sanitize.read("memcheck", "x", output, 0)
    assert (found.status, found.errors) == (status, errors)
    assert found.detail or status == sanitize.CLEAN


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


#: Runs what it is given, and finds fault with what is planted.
HONEST = """
while [ "$1" != "$0" ] && ! [ -x "$1" ]; do shift; done
case "$3" in conform) "$@"; n=0;; *) echo "SANITIZED {\\"calls\\": 1, \\"wrong\\": []}"; n=1;; esac
echo "========= ERROR SUMMARY: $n errors"
"""
SILENT = 'echo "SANITIZED {\\"calls\\": 1, \\"wrong\\": []}"; echo "========= ERROR SUMMARY: 0 errors"'


def run(monkeypatch, capsys, command: str | None) -> tuple[int, str]:
    monkeypatch.setattr(sanitize, "find", lambda: command)
    code = sanitize.main(["--tools", "memcheck", "--ops", "linear_logp", "--jobs", "1", "--limit-s", "120"])
    return code, capsys.readouterr().out


def test_without_the_tool_it_says_so(monkeypatch, capsys):
    code, said = run(monkeypatch, capsys, None)
    assert code == 0
    assert said.startswith("NOT RUN")


def test_a_tool_that_finds_nothing_that_is_planted_proves_nothing(monkeypatch, capsys, tmp_path):
    code, said = run(monkeypatch, capsys, script(tmp_path / "tool", SILENT))
    assert code == 1
    assert "FAILED memcheck planted fault: " in said
    assert "linear_logp" not in said


@pytest.mark.ci
def test_calls_run_under_the_tool(monkeypatch, capsys, tmp_path):
    code, said = run(monkeypatch, capsys, script(tmp_path / "tool", HONEST))
    assert code == 0, said
    assert "clean memcheck planted fault" in said
    assert "clean memcheck linear_logp: " in said
    assert '"calls": 0' not in said


def test_the_tool_of_a_wheel_is_found(monkeypatch, tmp_path):
    place = tmp_path / "nvidia" / "cu13" / "bin"
    place.mkdir(parents=True)
    script(place / "compute-sanitizer", "exit 0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    if not os.access("/usr/local/cuda/bin/compute-sanitizer", os.X_OK):
        assert sanitize.find() == str(place / "compute-sanitizer")


def test_small_calls_are_judged():
    found = sanitized.conform(["jsd", "linear_logp"], 60.0)
    assert found["calls"] >= 8
    assert found["wrong"] == found["left"] == []
    assert sanitized.conform(["linear_logp"], -1.0)["left"]
