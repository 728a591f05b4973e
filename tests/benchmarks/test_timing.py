"""Taking turns and medians, with clocks that say what a test tells them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import ceilings
from benchmarks.timing import CpuClock, Timing, clock_of, host_us, in_turn, rotated


def test_each_goes_first_once():
    assert [rotated(["a", "b", "c"], turn)[0] for turn in range(3)] == ["a", "b", "c"]
    assert rotated(["a", "b", "c"], 4) == ["b", "c", "a"]
    assert rotated([], 3) == []


def test_one_sample_of_each_a_round():
    order = []

    def sample(name):
        order.append(name)
        return float(len(order))

    seen = in_turn({"a": lambda: sample("a"), "b": lambda: sample("b")}, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seen == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_the_median_and_the_spread():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.ms == 3.0
    assert timing.spread == pytest.approx((52.0 - 1.5) / 3.0)
    assert Timing.of([5.0]) == Timing(5.0, 0.0)


def test_what_remains_is_taken_round_by_round():
    # Both drift together; the difference does not.
    assert Timing.difference([5.0, 8.0, 11.0], [3.0, 6.0, 9.0]).ms == 2.0


def test_a_sweep_is_divided_by_its_calls(monkeypatch):
    now = iter([0.0, 0.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    calls = []
    sample = CpuClock().graph(lambda: calls.append(1), 5)
    assert sample() == pytest.approx(100.0)  # half a second over five calls, in ms
    assert len(calls) == 2  # one before anything is timed


def test_the_cpu_has_a_clock_without_graphs():
    clock = clock_of(torch.device("cpu"))
    assert not clock.graphs
    assert clock.sets(1 << 40) > 1


def test_host_time_counts_the_calls(monkeypatch):
    now = iter([0.0, 20e-6])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    assert host_us(lambda: None, calls=10) == pytest.approx(2.0)


def test_ceilings_are_bytes_and_operations_over_time():
    class Fixed(CpuClock):
        def events(self, call):
            call()
            return lambda: 2.0  # ms

    found = ceilings.measure(Fixed(), torch.device("cpu"), rounds=1)
    assert found.copy_tb_s == pytest.approx(2 * ceilings.TINY_BYTES / 2e-3 / 1e12)
    assert found.product_tflop_s == pytest.approx(2 * ceilings.TINY_SIDE**3 / 2e-3 / 1e12)
