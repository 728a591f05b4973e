"""The modules of this directory import each other by name, here and in ``python -m tests.fuzz.drive``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
