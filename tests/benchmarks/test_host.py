"""The command ``host``: its parts and verdicts."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import host


def test_it_measures_both_states_and_the_import(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(host, "import_ms", lambda statement, repeats: float(len(statement)))
    found = host.run(torch.device("cpu"), tmp_path, rows=2, width=8, scale="tiny", say=said.append)
    assert json.loads((tmp_path / host.FILE).read_text())["us"] == found["us"]
    for state in ("grad", "no grad"):
        times = found["us"][state]
        assert {"ours", "hard-wired", "eager", "dispatch"} == times.keys()  # no other package runs on a CPU
        assert times["dispatch"] == times["ours"] - times["hard-wired"]
        assert times["ours"] > 0
    assert found["import_ms"] == len("import liger_registry")
    assert "liger" in found["about"]["absent"]
    assert [line.split(":")[0] for line in found["decisions"]] == ["grad", "grad", "no grad"]
    assert len(said) == 5


def test_verdicts():
    by_target = {v["target"]: v["text"] for v in host.judge({"ours": 20.0, "dispatch": 2.1})}
    assert by_target == {"ours.us <= 22": "met", "dispatch.us <= 2": "short by 4.8%"}


def test_each_is_called_alike():
    calls = {"a": 0, "b": 0}

    def count(name):
        calls[name] += 1

    found = host.medians({"a": lambda: count("a"), "b": lambda: count("b")}, calls=4, rounds=3)
    assert calls["a"] == calls["b"] == host.WARM + 3 * (host.WARM + 4)
    assert found.keys() == {"a", "b"}


@pytest.mark.ci
def test_an_import_is_timed_in_a_fresh_interpreter():
    assert host.import_ms("time.sleep(0.02)", 1) >= 20.0  # milliseconds, and no less than it sleeps
