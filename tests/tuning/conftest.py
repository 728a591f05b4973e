"""Makes ``planted`` importable by name, here and, through sys.path, in the worker."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
