"""``liger-tune compile`` with real compiles for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def compile_verb(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "liger_registry.cli", "compile", *arguments],
        env={**os.environ, "LIGER_TUNE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_sample_compiles_and_says_what_it_needs(tmp_path: Path) -> None:
    arguments = ("qwen3-0.6b", "--op", "rms_norm", "--device", "h100,mi300x", "--sample", "4")
    done = compile_verb(tmp_path, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["device"].split("/")[0] for row in rows} == {"cuda", "rocm"}
    assert {row["aligned"] for row in rows} == {True, False}
    assert all(row["error"] == "" and row["shared_memory"] >= 0 and row["registers"] > 0 for row in rows)
    assert list((tmp_path / "compiled").rglob("*.json"))
    again = compile_verb(tmp_path, *arguments)
    assert again.returncode == 0
    assert "4 of " in again.stdout
    assert " 0 failed" in again.stdout


def test_a_config_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from liger_registry import runtime
    from liger_registry.cli import app
    from liger_registry.compile import Compiled
    from liger_registry.compile_pool import CompilePool

    def much(pool: CompilePool, records: list[object], *_: object) -> list[Compiled]:
        return [Compiled("m:_forward", 255, 9, 300_000, 128, 1000, "hash") for _ in records]

    monkeypatch.setenv("LIGER_TUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "registry", runtime.Registry())
    monkeypatch.setattr(CompilePool, "compile", much)
    result = CliRunner().invoke(
        app, ["compile", "qwen3-0.6b", "--op", "rms_norm", "--device", "h100", "--sample", "2", "--details"]
    )
    assert result.exit_code == 1, result.output
    assert "300000 bytes of shared memory" in result.stdout
    assert "failed: cuda/sm_90/h100-sxm-132 rms_norm cuda:" in result.stdout
