"""Targets and verdicts, by numbers whose answers are plain."""

from __future__ import annotations

import math

import pytest

from benchmarks.targets import Tally, Target, extra, extra_of, own, share, times


def judged(target, **figures):
    return target.judge({name.replace("__", "."): value for name, value in figures.items()}.get)


@pytest.mark.parametrize(
    ("target", "figures", "value", "score", "word", "text"),
    [
        (share(0.8), {"bound__ms": 9.0, "ours__ms": 10.0}, 0.9, 1.125, "met", "met"),
        (share(0.8), {"bound__ms": 8.0, "ours__ms": 10.0}, 0.8, 1.0, "met", "met"),
        (share(0.8), {"bound__ms": 7.6, "ours__ms": 10.0}, 0.76, 0.95, "short", "short by 5.0%"),
        (share(0.8), {"bound__ms": 7.0, "ours__ms": 10.0}, 0.7, 0.875, "below .9", "below .9, short by 12.5%"),
        (times("liger", 0.5), {"ours__ms": 2.0, "liger__ms": 5.0}, 0.4, 1.25, "met", "met"),
        (times("liger", 0.5), {"ours__ms": 2.0, "liger__ms": 3.8}, 2 / 3.8, 0.95, "short", "short by 5.0%"),
        (times("liger", 0.5), {"ours__ms": 2.0, "liger__ms": 2.0}, 1.0, 0.5, "below .9", "below .9, short by 50.0%"),
        (extra(1.6), {"ours__extra_gib": 1.28}, 1.28, 1.25, "met", "met"),
        (extra(1.6), {"ours__extra_gib": 2.0}, 2.0, 0.8, "below .9", "below .9, short by 20.0%"),
        (extra_of("trl", 0.6), {"ours__extra_gib": 1.5, "trl__extra_gib": 3.0}, 0.5, 1.2, "met", "met"),
        (
            Target("ours.first_s", 2.0, less="hf.first_s"),
            {"ours__first_s": 5.0, "hf__first_s": 2.9},
            2.1,
            2 / 2.1,
            "short",
            "short by 4.8%",
        ),
        (Target("ours.tokens_s", 1.2, "liger.tokens_s", least=True), {"ours__tokens_s": 60.0, "liger__tokens_s": 50.0},
         1.2, 1.0, "met", "met"),
    ],
)  # fmt: skip
def test_a_verdict_says_how_far(target, figures, value, score, word, text):
    verdict = judged(target, **figures)
    assert verdict.value == pytest.approx(value)
    assert verdict.score == pytest.approx(score)
    assert (verdict.word, verdict.text) == (word, text)


def test_sooner_than_the_other_is_under_any_limit():
    verdict = judged(Target("ours.first_s", 2.0, less="hf.first_s"), ours__first_s=1.0, hf__first_s=3.0)
    assert (verdict.value, verdict.word) == (-2.0, "met")
    assert verdict.to_json()["score"] is None  # infinite, for which JSON has no word


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"ours__ms": 1.0},
        {"bound__ms": 1.0},
        {"bound__ms": 1.0, "ours__ms": math.nan},
        {"bound__ms": 1.0, "ours__ms": -0.1},
        {"bound__ms": 1.0, "ours__ms": 0.0},
    ],
)
def test_what_was_not_measured_is_no_verdict(figures):
    verdict = judged(share(0.9), **figures)
    assert (verdict.value, verdict.score, verdict.word) == (None, None, "not measured")


def test_a_ratio_to_another_row_names_it():
    target = own("loss 8", 0.58)
    figures = {"ours.ms": 5.0, "loss 8:ours.ms": 10.0}
    assert target.judge(figures.get).value == 0.5
    assert target.text == "ours.ms / loss 8:ours.ms <= 0.58"


def test_a_limit_is_positive():
    with pytest.raises(ValueError, match="leaves nothing"):
        Target("ours.ms", 0.0)


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["met"] * 9 + ["short"], True),
        (["met"] * 8 + ["short"] * 2, False),
        (["met"] * 10 + ["below .9"], False),
        (["met"] * 10 + ["not measured"], False),
        ([], False),
    ],
)
def test_nine_of_ten_and_none_far_off(words, passed):
    assert Tally.of(words).passed is passed


def test_the_tally_in_words():
    assert Tally.of(["met", "met", "met", "below .9", "not measured"]).text == (
        "3 of 4 met (75%), 1 below .9, 1 not measured"
    )
