"""``python -m liger_registry.cli``, for ``torchrun -m``."""

from __future__ import annotations

from liger_registry.cli import main

if __name__ == "__main__":
    main()
