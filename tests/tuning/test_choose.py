from __future__ import annotations

import itertools

import planted
import pytest

from liger_registry.config import Config
from liger_registry.table import Choice
from liger_registry.tuning.candidates import Candidate
from liger_registry.tuning.choose import choose, is_noisy, least_gain, standard
from liger_registry.tuning.outcome import Outcome

A, B, C, D = (Choice("any:x", Config(n=n)) for n in range(4))


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ((100.0, 90.0, 80.0, 70.0), D),
        ((100.0, 70.6, 80.0, 70.0), B),  # within 1 % of the fastest, and declared before it
        ((100.0, 70.8, 80.0, 70.0), D),
        ((100.0, 98.5, 98.1, 99.0), A),  # 2 % are not exceeded
        ((100.0, 98.2, 97.9, 99.0), C),  # B alone would not have replaced the default
        ((100.0, 110.0, 120.0, 130.0), A),
        ((100.0, float("inf"), 120.0, 130.0), A),
    ],
)
def test_equals_go_to_the_default_and_then_to_the_first_declared(times, choice):
    by_choice = dict(zip((A, B, C, D), times, strict=True))
    for order in itertools.permutations(by_choice):
        assert choose({c: by_choice[c] for c in order}, A, (A, B, C, D), 0.02) == choice


def test_a_little_noise_flips_no_choice_among_equals():
    for noise in itertools.product((0.996, 1.0, 1.004), repeat=2):
        assert choose({A: 100.0, B: 80.0 * noise[0], C: 79.96 * noise[1]}, A, (A, B, C), 0.02) == B


def test_the_gain_that_replaces_a_default():
    assert least_gain([Outcome("ok", noise=0.001), Outcome("ok", drift=0.01)]) == 0.02
    assert least_gain([Outcome("ok", noise=0.001), Outcome("ok", drift=0.025)]) == 0.025
    assert least_gain([Outcome("ok", drift=0.04)]) == pytest.approx(0.12)
    assert is_noisy([Outcome("ok", foreign=True)])


def test_the_next_in_order_is_the_standard_where_the_default_fails():
    one, two, three = (Candidate(planted.BLOCKED, Config(block=b), b == 64) for b in (32, 64, 128))
    assert standard(one, [three, one], [one, two, three]) is one
    assert standard(one, [three, two], [one, two, three]) is two
    assert standard(one, [three], [one, two, three]) is three
