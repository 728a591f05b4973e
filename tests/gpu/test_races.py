"""Races that are planted, and the tuner's verification: it turns all of them down, and nothing that is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import racing

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.tuning.layouts import bits
from liger_registry.tuning.streams import differs
from liger_registry.tuning.verify import verify


def verified(function):
    return verify(racing.OP, racing.planted(function), Config(), racing.PROBLEM, Device.default(), "cuda")


@pytest.mark.parametrize("function", racing.RIGHT)
def test_sums_that_wait_pass(function):
    for _ in range(3):
        found = verified(function)
        assert found.passed, found.detail


@pytest.mark.parametrize("function", racing.BETWEEN_PROGRAMS)
def test_races_between_programs_are_turned_down(function):
    caught = 0
    for _ in range(3):
        found = verified(function)
        print(found.detail[:300])
        caught += not found.passed
    assert caught == 3


@pytest.mark.parametrize("function", racing.BETWEEN_STREAMS)
def test_races_between_streams_are_turned_down(function):
    caught = 0
    for _ in range(3):
        found = verified(function)
        print(found.detail[:300])
        caught += not found.passed
    assert caught == 3


@pytest.mark.parametrize("function", [racing.kept_counter, racing.kept_scratch])
def test_they_show_on_two_streams_alone(function):
    """One call after the other is right, which is why verification runs two at once."""
    x = torch.randn(4096, racing.HIDDEN, device="cuda")
    first = function(x)
    torch.testing.assert_close(first, x.sum(0), rtol=1e-4, atol=1e-3)
    assert all(torch.equal(bits(first), bits(function(x))) for _ in range(20))
    torch.cuda.synchronize()
    assert differs(lambda rows: (function(rows),), (x,), huge=False)
    racing._kept_counter.cache_clear()  # two streams may leave it at any number
