"""A command line per test, over a registry of its own, and one cache that was warmed in a real process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

Result = Any
TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
# Two norms of the hidden size and one of queries and keys each, forward and backward.
WARMUP = ("--op", "rms_norm", "--batch", "2", "--seq", "4", "--device", "cpu")


def write_model(directory: Path, **changes: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
    return directory


def run_process(*arguments: object, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "liger_registry.cli", *map(str, arguments)],
        env={**os.environ, "LIGER_TUNE_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a tiny model."""
    return write_model(tmp_path / "tiny-model")


@pytest.fixture(scope="session")
def warmed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that ``liger-tune warmup`` filled in a process of its own; not to be written to."""
    root = tmp_path_factory.mktemp("warmed")
    done = run_process("warmup", write_model(root / "model"), *WARMUP, "--json", cache=root / "cache")
    assert done.returncode == 0, done.stderr
    (root / "report.json").write_text(done.stdout)
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of this test, empty."""
    path = tmp_path / "cache"
    monkeypatch.setenv("LIGER_TUNE_CACHE_DIR", str(path))
    return path


@pytest.fixture
def warmed(cache: Path, warmed_once: Path) -> Path:
    """The cache directory of this test, with the tables of the warmed one."""
    shutil.copytree(warmed_once / "cache", cache)
    return cache


@pytest.fixture
def tune(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``liger-tune`` in this process; with ``code`` the exit code it must have, by default 0, None for any."""
    from liger_registry import runtime
    from liger_registry.cli import app

    def run(*arguments: object, code: int | None = 0) -> Result:
        # A registry reads the environment once; each command has its own, as each process has.
        monkeypatch.setattr(runtime, "registry", runtime.Registry())
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code in (None, result.exit_code), result.output
        return result

    return run


@pytest.fixture
def tune_json(tune: Callable[..., Result]) -> Callable[..., Any]:
    """Like ``tune``, with ``--json``: what it printed, parsed."""
    return lambda *arguments, code=0: json.loads(tune(*arguments, "--json", code=code).stdout)
