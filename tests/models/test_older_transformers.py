"""All of it with the oldest transformers that is supported."""

from __future__ import annotations

import json
import os
import subprocess

import older_transformers
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
ZOO = "tests/models/test_zoo.py"


def run(*args):
    """Run a module in that Python, from the checkout; returns what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [older_transformers.python(), *args],
        cwd=older_transformers.ROOT,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_it_is_that_release():
    code = "import json, torch, transformers; print(json.dumps([transformers.__version__, torch.__version__]))"
    version, with_torch = json.loads(run("-c", code).splitlines()[-1])
    assert version.startswith("4.57.")
    assert with_torch == torch.__version__


def test_all_types_are_the_same():
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", f"{ZOO}::test_all_types")


def test_the_tests_of_models_pass():
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", "tests/models")
    assert " passed" in out
