"""A Python with the oldest transformers that is supported: one that is given, or an environment made for it.

``PYTHON_WITH_TRANSFORMERS_4`` names one that has this checkout and pytest installed. Without it an environment is made
in ``.cache`` of the checkout. It sees all that the running one has, and before that the releases below.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "PYTHON_WITH_TRANSFORMERS_4"
# What transformers 4.57 needs in other releases than the newest does.
PINS = (
    "transformers==4.57.6",
    "huggingface-hub==0.36.2",
    "tokenizers==0.22.2",
    "kernels==0.9.0",
    "datasets==4.8.0",  # transformers' Trainer imports it, and later ones want a later huggingface-hub
    "fsspec==2026.2.0",
)


def python() -> str:
    """The interpreter's path."""
    given = os.environ.get(VARIABLE)
    return given or str(made(ROOT / ".cache" / f"transformers-4-{sys.version_info[0]}.{sys.version_info[1]}"))


def made(place: Path) -> Path:
    """The interpreter of an environment, which is made where there is none of these releases yet."""
    interpreter = place / "bin" / "python"
    stamp = place / "installed"
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not stamp.exists() or stamp.read_text().split() != list(PINS):
            venv.create(place, clear=True, symlinks=True)
            own = sysconfig.get_path("purelib", vars={"base": str(place)})
            # Through addsitedir, which reads the .pth files there: this checkout is installed by one.
            around = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            (Path(own) / "around.pth").write_text(around)
            constraints = place / "constraints.txt"
            constraints.write_text(constrained((ROOT / "constraints.txt").read_text()))
            command = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet"]
            subprocess.run([*command, "-c", str(constraints), *PINS], check=True, timeout=1800)
            stamp.write_text("\n".join(PINS))
    return interpreter


def constrained(text: str) -> str:
    """The constraints of the checkout for all but these packages."""
    names = {pin.split("==")[0] for pin in PINS}
    return "\n".join(line for line in text.splitlines() if line.split("==")[0] not in names) + "\n"
