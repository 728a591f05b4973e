"""A candidate is timed once it is right for contiguous tensors, and chosen once it is right for all."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import planted
import pytest

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.problem import BACKWARD
from liger_registry.store import TableStore
from liger_registry.table import PARTLY, Choice
from liger_registry.tuning.tuner import tune

CPU = Device.parse("cpu")
CONTIGUOUS = planted.implementation(
    planted.backward_contiguous,
    phase=BACKWARD,
    space=ConfigSpace(cost=[1, 2, 3]),
    heuristic=lambda problem, device: Config(cost=3),
)
RIGHT = planted.implementation(
    planted.backward,
    "right",
    phase=BACKWARD,
    space=ConfigSpace(cost=[90, 60, 50, 40, 30]),
    heuristic=lambda problem, device: Config(cost=90),
)


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    planted.reset()


@pytest.fixture
def store(tmp_path):
    return TableStore(tmp_path / "tables")


def run(problems, catalog, store, **options):
    return tune(
        problems, catalog=catalog, device=CPU, store=store, isolate=False, clock_source="planted:clock", **options
    )


def by_choice(store, problem):
    return {str(s.choice): s for s in store.load(CPU, problem.op).samples_of(problem)}


def test_what_is_right_for_contiguous_gradients_alone_is_not_chosen(store):
    problem = planted.problem(phase=BACKWARD)
    catalog = planted.catalog(planted.PLAIN_BACKWARD, CONTIGUOUS)
    (row,) = run([problem], catalog, store).rows
    assert (row.status, row.choice) == ("default", Choice("any:plain", Config()))
    assert {c: s.status for c, s in by_choice(store, problem).items()} == {
        "any:plain()": "ok", **{f"any:backward_contiguous(cost={cost})": "wrong" for cost in (1, 2, 3)},
    }  # fmt: skip
    source = by_choice(store, problem)["any:backward_contiguous(cost=1)"].provenance.source
    assert not store.load(CPU, "affine").verified(CONTIGUOUS, source)


def test_the_next_best_takes_the_place_of_a_finalist_that_fails(store):
    problem = planted.problem(phase=BACKWARD)
    (row,) = run([problem], planted.catalog(planted.PLAIN_BACKWARD, CONTIGUOUS, RIGHT), store).rows
    assert (row.status, row.choice) == ("tuned", Choice("any:right", Config(cost=30)))
    found = by_choice(store, problem)
    assert {c for c, s in found.items() if s.status == "wrong"} == {
        f"any:backward_contiguous(cost={cost})" for cost in (1, 2, 3)
    }
    # The best three, the default, and each implementation's heuristic; the others are timed and no more.
    assert {c for c, s in found.items() if s.verified} == {
        "any:plain()", *(f"any:right(cost={cost})" for cost in (30, 40, 50, 90)),
    }  # fmt: skip
    assert found["any:right(cost=60)"].detail == PARTLY


def test_a_default_that_is_wrong_for_other_layouts_makes_room(store):
    problem = planted.problem(phase=BACKWARD)
    wrong = replace(CONTIGUOUS, name="plain", space=ConfigSpace(cost=[1]), heuristic=lambda p, d: Config(cost=1))
    (row,) = run([problem], planted.catalog(wrong, RIGHT), store).rows
    assert row.default == Choice("any:right", Config(cost=90))
    assert row.choice == Choice("any:right", Config(cost=30))
    (row,) = run([planted.problem(phase=BACKWARD, rows=128)], planted.catalog(wrong), store).rows
    assert row.status == "failed"
    assert "any:plain(cost=1): wrong" in row.detail


def test_samples_of_an_earlier_run_are_verified_before_one_is_chosen(store):
    problem, catalog = planted.problem(phase=BACKWARD), planted.catalog(planted.PLAIN_BACKWARD, CONTIGUOUS, RIGHT)

    def stop(progress):
        if progress.text.endswith("in full"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([problem], catalog, store, progress=stop)
    samples = by_choice(store, problem)
    assert {s.status for s in samples.values()} == {"ok"}
    assert {s.detail for s in samples.values()} == {PARTLY}
    (row,) = run([problem], catalog, store).rows
    assert (row.measured, row.reused) == (0, 9)
    assert row.choice == Choice("any:right", Config(cost=30))


def test_a_challenger_of_an_earlier_choice_is_verified_too(store):
    problem = planted.problem(phase=BACKWARD)
    run([problem], planted.catalog(planted.PLAIN_BACKWARD, RIGHT), store)
    (row,) = run([problem], planted.catalog(planted.PLAIN_BACKWARD, RIGHT, CONTIGUOUS), store).rows
    assert row.measured == 3
    assert row.choice == Choice("any:right", Config(cost=30))
    assert by_choice(store, problem)["any:backward_contiguous(cost=1)"].status == "wrong"


def test_what_failed_in_full_is_not_tried_again_in_the_next_bucket(store):
    problems = [planted.problem(phase=BACKWARD, rows=rows) for rows in (64, 128)]
    run(problems, planted.catalog(planted.PLAIN_BACKWARD, CONTIGUOUS), store)
    assert by_choice(store, problems[1])["any:backward_contiguous(cost=1)"].time_us is None
