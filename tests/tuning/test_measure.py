from __future__ import annotations

import pytest
import torch

from liger_registry.tuning.measure import Block, CpuTimer, Timing, extra_bytes, measure, protocol_of


class Scripted:
    """A timer that is told what each call and each look at the anchor costs."""

    protocol = "scripted"
    overhead_us = 0.0

    def __init__(self, anchors=(10.0,)):
        self.anchors = list(anchors)
        self.log = []

    def time(self, call):
        result = call()
        self.log.append(result)
        return result

    def anchor(self):
        return self.anchors.pop(0) if len(self.anchors) > 1 else self.anchors[0]


def test_calls_are_timed_in_turn():
    timer = Scripted()
    block = measure([lambda: 1.0, lambda: 2.0], timer, 10.0)
    assert [t.time_us for t in block.timings] == [1.0, 2.0]
    assert timer.log[2:] == [1.0, 2.0] * 5
    assert block.drift == 0
    assert not block.noisy


@pytest.mark.parametrize(("budget", "repeats"), [(0.0, 3), (50.0, 5), (1e9, 400)])
def test_repeats_follow_the_budget_within_bounds(budget, repeats):
    timer = Scripted()
    measure([lambda: 10.0], timer, budget)
    assert len(timer.log) == 1 + repeats


def test_the_budget_pays_for_what_a_sample_takes_beside_the_call():
    timer = Scripted()
    timer.overhead_us = 15.0
    measure([lambda: 10.0], timer, 100.0)
    assert len(timer.log) == 1 + 4


def test_what_is_clearly_slower_is_given_up_after_a_few_samples():
    timer, times = Scripted(), iter([90.0, 90.0, 21.0, 19.0, *[21.0] * 20])
    measure([lambda: 30.0], timer, 900.0, stop_us=20.0)
    assert timer.log == [30.0] * (1 + 3)
    timer.log.clear()
    measure([lambda: next(times)], timer, 900.0, stop_us=20.0)
    assert len(timer.log) == 1 + 10, "one of the first was fast enough"


@pytest.mark.parametrize(("after", "noisy"), [(10.2, False), (10.4, True), (9.6, True)])
def test_an_anchor_that_drifts_marks_the_block(after, noisy):
    block = measure([lambda: 1.0], Scripted([10.0, after]), 10.0)
    assert block.noisy is noisy
    assert block.noise == pytest.approx(abs(after - 10) / min(after, 10))


def test_outliers_do_not_move_the_mean_of_the_middle_half_but_spread_is_noise():
    assert Timing.of([1.0, 1.0, 1.0, 1.0, 99.0]).time_us == 1.0
    assert Timing.of([1.0] * 9).noise == 0
    assert Timing.of([1.0, 2.0] * 8).noise > 0.1
    assert Timing.of([0.0, 0.0, 0.0, 0.0]) == Timing(0.0, 0.0)


def test_which_call_starts_is_told_before_it_runs():
    order = []
    measure(
        [lambda: order.append("a") or 1.0, lambda: order.append("b") or 1.0], Scripted(), 1.0, starting=order.append
    )
    assert order[:6] == [0, "a", "a", 1, "b", "b"]


def test_no_calls_no_timings():
    assert measure([], Scripted(), 1.0) == Block((), 0.0)


def test_cpu_timer_reads_the_given_clock():
    now = [0.0]
    timer = CpuTimer(lambda: now[0])
    assert timer.time(lambda: now.__setitem__(0, now[0] + 0.25)) == 250_000
    assert timer.anchor() == 0
    assert CpuTimer().anchor() > 0


def test_protocols():
    assert protocol_of("cpu") == "cpu-clock-1"
    assert protocol_of("cuda:1") == "cuda-events-1"


def test_nobody_counts_bytes_on_a_cpu():
    assert extra_bytes(lambda: None, torch.device("cpu")) is None


def test_the_mean_of_the_middle_half_is_finer_than_the_clock():
    ticks = [10.0, 10.5, 11.0]
    mostly_low = Timing.of([ticks[n % 3 if n % 5 else 0] for n in range(100)])
    mostly_high = Timing.of([ticks[n % 3 if n % 5 else 2] for n in range(100)])
    assert 10.0 < mostly_low.time_us < 10.5 < mostly_high.time_us < 11.0
