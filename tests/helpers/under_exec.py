"""Programs run by ``liger-tune exec``, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent


def run(*command: object, code: int = 0, execute: bool = True, **environment: str) -> str:
    """What a command prints on stdout, run under ``exec`` or not; ``code`` is the exit code that it must have."""
    exec_verb = [sys.executable, "-m", "liger_registry.cli", "exec", "--"] if execute else []
    done = subprocess.run(
        [*exec_verb, *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def python(code: str, execute: bool = True, **environment: str) -> str:
    """What a program prints."""
    return run(sys.executable, "-c", textwrap.dedent(code), execute=execute, **environment)
