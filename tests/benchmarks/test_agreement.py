"""The command ``agreement``: two tables of one operation, by hand."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks import agreement
from benchmarks.__main__ import app
from liger_registry.config import Config, Fields
from liger_registry.problem import Problem
from liger_registry.store import write_file
from liger_registry.table import Choice, Provenance, Sample, Stored, Table

PROVENANCE = Provenance("3.6", "0123456789ab", torch="2.9.0", driver="570.1", date="2025-06-07T08:09:10Z")
FAST, SLOW = (Choice("cuda:persistent", Config(block_rows=rows)) for rows in (4, 8))
PROTOCOL = "cuda-events-1"


def problem(rows):
    dims, dtypes = Fields(hidden=4096, rows=rows), Fields(x="bfloat16", weight="bfloat16")
    return Problem("rms_norm", "default", "forward", dims, dtypes, Fields(casting="llama"))


def write(path, choices, costs=None):
    """A table that chose one of two for each problem, at 100 us; ``costs`` is the other's time."""
    decisions, samples = [], []
    for rows, choice in choices.items():
        decisions.append(Stored(problem(rows), choice, 100.0, choice, 100.0, 0.01, PROTOCOL, PROVENANCE))
        other = SLOW if choice == FAST else FAST
        times = {choice: 100.0, other: (costs or {}).get(rows)}
        samples += [
            Sample(problem(rows), c, "ok", t, 0, "", PROTOCOL, PROVENANCE) for c, t in times.items() if t is not None
        ]
    write_file(path, Table(("cuda", "sm_90", "h200-132"), "rms_norm", {"vendor": "cuda"}).merged(decisions, samples))
    return path


def test_equal_choices_agree(tmp_path):
    one, two = (write(tmp_path / name, {64: FAST, 128: SLOW}) for name in ("one.json", "two.json"))
    said = []
    assert agreement.run(one, two, said.append)
    assert said[-1].startswith("2 of 2 equal")


def test_a_choice_that_costs_little_by_the_others_times_agrees(tmp_path):
    one = write(tmp_path / "one.json", {64: FAST}, {64: 101.0})
    two = write(tmp_path / "two.json", {64: SLOW}, {64: 101.5})
    said = []
    assert agreement.run(one, two, said.append)
    assert said[0].endswith("costs +1.0% / +1.5%")


@pytest.mark.parametrize("cost", [102.5, None])
def test_one_that_costs_more_or_was_not_tried_does_not(tmp_path, cost):
    one = write(tmp_path / "one.json", {64: FAST}, {64: cost})
    two = write(tmp_path / "two.json", {64: SLOW}, {64: 100.0})
    assert not agreement.run(one, two, lambda line: None)
    assert CliRunner().invoke(app, ["agreement", str(one), str(two)]).exit_code == 1


def test_tables_without_a_common_problem_cannot_agree(tmp_path):
    one, two = write(tmp_path / "one.json", {64: FAST}), write(tmp_path / "two.json", {128: FAST})
    with pytest.raises(ValueError, match="no problem in common"):
        agreement.run(one, two)
    assert CliRunner().invoke(app, ["agreement", str(one), str(two)]).exit_code == 2
