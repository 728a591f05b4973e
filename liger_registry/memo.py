"""A bounded memo that several threads may change."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def keep(memo: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Add to a memo of at most ``most`` entries; the oldest makes room."""
    while len(memo) >= most:
        with suppress(RuntimeError, StopIteration, KeyError):  # another thread changed it meanwhile
            del memo[next(iter(memo))]
    memo[key] = value
