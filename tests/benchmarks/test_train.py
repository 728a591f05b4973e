"""The command ``train``: setups, verdicts and one step of each kind."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import train, train_step
from benchmarks.__main__ import app

CPU = torch.device("cpu")


def result(tokens_s, peak_gib=None, first_s=1.0, losses=(4.0, 3.0), ms=1.0):
    return {"tokens_s": tokens_s, "ms": ms, "peak_gib": peak_gib, "first_s": first_s, "losses": list(losses)}


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        (
            "llama-3-8b-8layers",
            [
                "ours.tokens_s / liger.tokens_s >= 1.03",
                "ours.peak_gib / liger.peak_gib <= 1.08",
                "ours-low.peak_gib / liger.peak_gib <= 1",
            ],
        ),
        ("qwen3-0.6b", ["ours.tokens_s / liger.tokens_s >= 1.2", "ours.peak_gib / liger.peak_gib <= 1.05"]),
        ("qwen3-0.6b-small", ["ours.ms / hf.ms <= 0.75"]),
    ],
)
def test_what_is_asked(model, texts):
    always = ["ours.first_s - hf.first_s <= 2", "ours-compile.loss_off <= 0.1"]
    assert [target.text for target in train.MODELS[model].targets] == [*texts, *always]


def test_the_setups_are_those_of_the_claim():
    told = {name: (s.batch, s.length, s.checkpoint) for name, s in train.MODELS.items()}
    assert told == {
        "llama-3-8b-8layers": (8, 4096, True),
        "qwen3-0.6b": (4, 4096, False),
        "qwen3-0.6b-small": (1, 512, False),
    }


def test_verdicts():
    runs = {
        "hf": result(100.0, 60.0, 1.0),
        "liger": result(150.0, 20.0),
        "ours": result(165.0, 21.5, 2.5),
        "ours-compile": result(170.0, losses=(4.0, 3.1)),
    }
    words = {v["target"]: v["text"] for v in train.judge("qwen3-0.6b", runs)}
    assert words == {
        "ours.tokens_s / liger.tokens_s >= 1.2": "short by 8.3%",  # 1.1 of 1.2
        "ours.peak_gib / liger.peak_gib <= 1.05": "short by 2.3%",  # 1.075
        "ours.first_s - hf.first_s <= 2": "met",
        "ours-compile.loss_off <= 0.1": "met",
    }


@pytest.mark.parametrize(
    ("losses", "off"),
    [((4.0, 2.0), 0.0), ((4.0, 3.0), 0.5), ((55.0, 2.0), 12.75), ((float("nan"), 2.0), float("inf"))],
)
def test_losses_are_compared_step_by_step(losses, off):
    assert train.loss_off(losses, (4.0, 2.0)) == pytest.approx(off)


def test_a_mode_that_failed_has_no_figures():
    runs = {"hf": result(100.0), "liger": {"failed": "no result after 400 s"}}
    assert not any(name.startswith("liger") for name in train.figures(runs))
    assert train.ratios(runs) == "hf 100 tok/s (1.00), 1.0 ms, first 1.0 s; liger: no result after 400 s"


@pytest.mark.parametrize("model", ["llama-3-8b-8layers", pytest.param("qwen3-0.6b", marks=pytest.mark.ci)])
def test_a_patched_model_learns_as_the_plain_one(model):
    plain, ours = (train_step.run(model, mode, "cpu", "tiny", 2) for mode in ("hf", "ours"))
    assert len(plain["losses"]) == 1 + train_step.WARM + 2
    assert plain["losses"][-1] < plain["losses"][0]
    assert train.loss_off(ours["losses"], plain["losses"]) < 0.01
    assert plain["applied"] == []
    assert "fused_linear_cross_entropy x 1" in ours["applied"]
    assert plain["tokens_s"] == pytest.approx(2 * 16 / plain["ms"] * 1e3)


def test_unknown_names_raise(tmp_path):
    with pytest.raises(ValueError, match="'gpt' is none of llama"):
        train.run(CPU, tmp_path, models=("gpt",))
    with pytest.raises(ValueError, match="'fast' is none of hf"):
        train.run(CPU, tmp_path, modes=("fast",))


def test_modes_join_those_of_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "one", lambda model, mode, *rest: result({"hf": 100.0, "ours": 130.0}[mode]))
    for mode in ("hf", "ours"):
        found = train.run(CPU, tmp_path, models=("qwen3-0.6b",), modes=(mode,), scale="tiny", say=lambda line: None)
    (row,) = found["rows"]
    assert list(row["modes"]) == ["hf", "ours"]
    # Sizes of another scale are another thing.
    found = train.run(CPU, tmp_path, models=("qwen3-0.6b",), modes=("hf",), scale="full", say=lambda line: None)
    assert list(found["rows"][0]["modes"]) == ["hf"]


def test_a_low_budget_reaches_the_process(monkeypatch):
    seen = {}

    def run(command, **options):
        seen[command[4]] = options["env"].get("LIGER_MEMORY_BUDGET")
        raise train.subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(train.subprocess, "run", run)
    assert "failed" in train.one("qwen3-0.6b", "ours-low", "cpu", "tiny", 1)
    train.one("qwen3-0.6b", "ours", "cpu", "tiny", 1)
    assert seen == {"ours-low": "2GiB", "ours": None}


@pytest.mark.ci
def test_the_command_runs_each_mode_in_a_process(tmp_path):
    asked = ["train", "--scale", "tiny", "--device", "cpu", "--model", "qwen3-0.6b-small", "--mode", "hf,liger"]
    done = CliRunner().invoke(app, [*asked, "--steps", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / train.FILE).read_text())["rows"]
    assert row["modes"]["hf"]["tokens_s"] > 0
    assert row["modes"]["liger"]["failed"].startswith("ModuleNotFoundError")  # named, and no end of the run
