"""Two and four ranks over gloo, started once a session; and the jobs beside this file importable on them by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import Ranks

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tuning")]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a world, by its size."""
    started: dict[int, Ranks] = {}
    yield lambda world: started.setdefault(world, Ranks(world))
    for one in started.values():
        one.close()
