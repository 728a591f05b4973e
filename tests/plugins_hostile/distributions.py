"""Installs distributions with entry points into a directory, as an installer does, and runs code beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
KERNELS = "liger_registry.kernels"


def install(
    site: Path,
    name: str,
    source: str,
    *,
    version: str = "1.0",
    group: str = KERNELS,
    value: str = "",
    api: str = "(1, 0)",
) -> None:
    """Write a distribution of one module, named as it is, whose ``register`` is its entry point."""
    module = name.replace("-", "_")
    head = f"LIGER_REGISTRY_API = {api}\n" if api else ""
    (site / f"{module}.py").write_text(head + textwrap.dedent(source))
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nkernels = {value or f'{module}:register'}\n")
    (info / "RECORD").write_text(f"{module}.py,,\n{info.name}/METADATA,,\n{info.name}/entry_points.txt,,\n")


def run(site: Path, cache: Path, code: str, *arguments: object, timeout: int = 280, **environ: str) -> Any:
    """What code printed as JSON in its last line, in a process that finds the distributions of ``site``."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (site, TESTS / "tuning", TESTS / "helpers"))),
            "LIGER_TUNE_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": "1",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
