"""What the interpreter does not see: races that a GPU's tests plant are right where programs run one after the other.

So a race counts as caught on a GPU alone (tests/gpu/test_races.py); here it shows that nothing else is wrong with them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import racing

SUMS = (*racing.RIGHT, *racing.BETWEEN_PROGRAMS, racing.kept_counter, racing.kept_scratch)


@pytest.mark.parametrize("function", SUMS)
def test_every_planted_race_is_right_in_order(function, monkeypatch):
    monkeypatch.setattr(racing, "PROGRAMS", 4)
    for rows in (13, 5):
        x = torch.randn(rows, 24)
        for _ in range(2):
            torch.testing.assert_close(function(x), x.sum(0))
