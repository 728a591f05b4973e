"""The command ``preference``: every loss runs, and what is asked of them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import preference
from benchmarks.__main__ import app
from benchmarks.preference import LOSSES, TINY, Data, step_of, targets_of
from benchmarks.timing import CpuClock

CPU = torch.device("cpu")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_of_ours_has_gradients(loss):
    for gradient in step_of("ours", loss, Data(TINY, 0.5, CPU))():
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_the_first_tokens_of_every_sequence_are_ignored():
    data = Data(TINY, 0.5, CPU)
    assert data.counted == TINY.sequences * TINY.tokens // 2
    assert (data.target[:, : TINY.tokens // 2] == -100).all()
    assert (data.target[:, TINY.tokens // 2 :] >= 0).all()


def test_a_product_is_of_the_tokens_that_count(monkeypatch):
    seen = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append((a.shape, b.shape)) or real(a, b, out=out))
    preference.product_step(Data(TINY, 0.5, CPU))()
    assert seen == [((16, 16), (16, 48))]


@pytest.mark.parametrize(
    ("loss", "ignored", "texts"),
    [
        ("orpo", 0.5, ["ours.ms / liger.ms <= 0.55", "ours.extra_gib <= 1.7", "ours.first_s <= 1.5"]),
        ("dpo", 0.5, ["ours.ms / liger.ms <= 0.55", "ours.extra_gib <= 1.7", "ours.first_s <= 1.5"]),
        ("simpo", 0.0, ["ours.ms / liger.ms <= 0.85"]),
        ("cpo", 0.8, []),
        ("kto", 0.5, []),
    ],
)
def test_what_is_asked(loss, ignored, texts):
    assert [target.text for target in targets_of(loss, ignored)] == texts


def test_the_sizes_are_those_of_the_claim():
    sizes = preference.Sizes()
    assert (sizes.sequences, sizes.tokens, sizes.hidden, sizes.vocab) == (8, 1024, 4096, 128256)


def test_a_row_has_the_bound_and_the_verdicts():
    row = preference.measured(TINY, CPU, CpuClock(), "dpo", 0.5, rounds=1, first=False)
    assert row["figures"]["bound.ms"] > 0
    assert row["figures"]["ours.ms"] > 0
    assert [verdict["verdict"] for verdict in row["targets"]] == ["not measured"] * 3
    assert row["failed"] == {}


def test_a_candidate_that_fails_is_named(monkeypatch):
    def broken(candidate, loss, data):
        def step():
            raise RuntimeError(f"{candidate} has no kernel")

        return step

    monkeypatch.setattr(preference, "step_of", broken)
    row = preference.measured(TINY, CPU, CpuClock(), "orpo", 0.0, rounds=1, first=False)
    assert row["failed"]["ours"] == "RuntimeError: ours has no kernel"
    assert "ours has no kernel" in preference.line(row)


def test_a_line_of_the_table():
    figures = {"bound.ms": 4.0, "ours.ms": 5.0, "ours.extra_gib": 1.5, "ours.first_s": 0.4, "liger.ms": 10.0}
    row = {"loss": "orpo", "ignored": 0.5, "figures": figures, "failed": {}}
    assert preference.line(row) == "| orpo | 50% | 4.0 | 5.0 ms, 1.50 GiB, 0.4 s | 10.0 ms |  | 0.50 |"
    assert preference.line(row).count("|") == preference.HEAD.splitlines()[0].count("|")


def test_the_command(tmp_path):
    asked = ["preference", "--scale", "tiny", "--device", "cpu", "--loss", "orpo,simpo", "--ignored", "0.5"]
    done = CliRunner().invoke(app, [*asked, "--rounds", "1", "--no-first", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / preference.FILE).read_text())
    assert [(row["loss"], row["ignored"]) for row in found["rows"]] == [("orpo", 0.5), ("simpo", 0.5)]
    assert found["sizes"] == {"sequences": 4, "tokens": 8, "hidden": 16, "vocab": 48}
    assert "first_s" not in "".join(found["rows"][0]["figures"])


def test_an_unknown_loss_raises(tmp_path):
    with pytest.raises(ValueError, match="no loss is called 'ppo'"):
        preference.run(CPU, tmp_path, losses=("ppo",), scale="tiny")


@pytest.mark.ci
def test_a_first_call_is_timed_in_a_process_of_its_own():
    seconds = preference.first_call(TINY, CPU, "ours", "orpo", 0.5)
    assert seconds is not None
    assert seconds > 0
    assert preference.first_call(TINY, CPU, "nobody", "orpo", 0.5) is None
