"""What a result says of where it comes from, and how it is written so that a run cut short loses nothing."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

#: The checkout.
ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = (
    "liger-registry",
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "quack-kernels",
    "cut-cross-entropy",
    "trl",
    "numpy",
)


def about(device: torch.device, **more: object) -> dict[str, Any]:
    """The device, the versions of everything, the date and the commit of a run."""
    return {
        "device": _device(device),
        "host": {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        **more,
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine()}
    found = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": found.name,
        "units": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "capability": f"{found.major}.{found.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _said(command).splitlines()[0] if _said(command) else ""


def versions() -> dict[str, str]:
    """The version of Python and of each distribution that is installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # What runs, which a constraint's local part does not say.
    found["torch"] = torch.__version__
    return found


def commit() -> str:
    """The commit of the checkout and whether it was changed since; ``LIGER_BENCHMARKS_COMMIT`` where there is none."""
    told = os.environ.get("LIGER_BENCHMARKS_COMMIT", "")
    found = _said(["git", "rev-parse", "HEAD"])
    if not found:
        return told or "unknown"
    return f"{found}{'+changes' if _said(['git', 'status', '--porcelain', '--untracked-files=no']) else ''}"


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def plain(value: Any) -> Any:
    """The value with numbers that JSON has no word for as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def write(path: Path, value: dict[str, Any]) -> None:
    """Write JSON whole or not at all: a run may be cut at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(plain(value), indent=1) + "\n")
    os.replace(aside, path)


def read(path: Path) -> dict[str, Any]:
    """A result that was written.

    Raises:
        ValueError: the file holds no result.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or "command" not in found:
        raise ValueError(f"{path} holds no result of this suite")
    return found
