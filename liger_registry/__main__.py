"""``python -m liger_registry``: the same as ``liger-tune``."""

from __future__ import annotations

from liger_registry.cli import main

if __name__ == "__main__":
    main()
