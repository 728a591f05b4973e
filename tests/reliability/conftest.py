"""Puts what the reliability tests share on the path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# planted's toy catalogue is in the second, and the soak and the run under a sanitizer are in the third.
sys.path[:0] = [str(HERE), str(HERE.parent / "tuning"), str(HERE.parent / "gpu")]
