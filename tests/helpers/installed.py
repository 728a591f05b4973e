"""Distributions of ``examples/``, installed as a user would install them, and code that sees them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_INSTALL = "install --quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check"


def install(example: str, place: Path) -> Path:
    """Install an example into a directory of its own, which is returned; building writes nothing into the checkout."""
    shutil.copytree(EXAMPLES / example, place / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", *_INSTALL.split(), "--target", str(place / "site"), str(place / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return place / "site"


def _environ(target: Path, cache: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(target), "LIGER_TUNE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "HF_MODULES_CACHE": str(cache / "modules")}


def run(target: Path, cache: Path, code: str, **environ: str) -> object:
    """What code printed as JSON in its last line, in a process that sees what was installed there."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**_environ(target, cache), **environ},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_tests(target: Path, cache: Path, example: str) -> None:
    """The example's own tests."""
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(cache), "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", *options, str(EXAMPLES / example / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=_environ(target, cache), cwd=cache)
    assert done.returncode == 0, done.stdout[-3000:]
