"""Puts what the reliability tests share on the path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tuning")]  # planted's toy catalogue is there
