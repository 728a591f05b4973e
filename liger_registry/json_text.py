"""JSON from anywhere: strict, and without a way to fill the memory from a small file."""

from __future__ import annotations

import json
from typing import Any, NoReturn

# An empty list takes 3 bytes of a document and 72 of memory, and a table of 64 MiB has about 2 million of all kinds.
MAX_COLLECTIONS = 4_000_000


def loads(data: bytes | str) -> Any:  # noqa: ANN401 - any JSON value
    """The value of a JSON text; bytes are UTF-8.

    Raises:
        ValueError: it is no JSON, has a key twice, or more than ``MAX_COLLECTIONS`` lists and objects.
        RecursionError, MemoryError: it is nested too deeply, or too large.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    if text.count("[") + text.count("{") > MAX_COLLECTIONS:
        raise ValueError(f"it has more than {MAX_COLLECTIONS:,} lists and objects")
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a JSON object has a key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
