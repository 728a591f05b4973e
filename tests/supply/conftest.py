"""The modules of this directory and of ``tests/fuzz`` are importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "fuzz")]
