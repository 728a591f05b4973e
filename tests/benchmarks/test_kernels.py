"""The command ``kernels``: what it writes, when it stops, and how it sums up; times themselves are not looked at."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import kernels
from benchmarks.__main__ import app
from benchmarks.cases import Case
from benchmarks.ceilings import Ceilings
from benchmarks.measure import Result
from benchmarks.table import TABLE, Row
from benchmarks.targets import own, share, times

CPU = torch.device("cpu")
NAMES = ("ours", "default", "eager", "liger")


def run(out, **options):
    said = []
    options = {"names": NAMES, "scale": "tiny", "models": False, "rounds": 2, **options}
    return kernels.run(CPU, out, say=said.append, **options), said


def row_of(key, targets=(), **figures):
    return {
        "key": key,
        "op": key.split()[0],
        "phase": "both",
        "targets": list(targets),
        "failed": {},
        "figures": {name.replace("__", "."): value for name, value in figures.items()},
    }


def test_a_run_says_where_it_was_and_what_it_found(tmp_path):
    document, said = run(tmp_path, only=("rms_norm", "cross_entropy"))
    written = json.loads((tmp_path / kernels.FILE).read_text())
    assert [row["key"] for row in written["rows"]] == [
        row.key for row in TABLE if row.case.op in ("rms_norm", "cross_entropy")
    ]
    assert written["command"] == "kernels"
    about = written["about"]
    assert about["device"]["type"] == "cpu"
    assert about["versions"]["torch"] == torch.__version__
    assert {"python", "liger-registry"} <= about["versions"].keys()
    assert about["date"].endswith("+00:00")
    assert about["commit"]
    assert "liger" in about["absent"]
    assert "liger" not in about["peers"]
    assert any(line.startswith("# absent: liger") for line in said)
    assert written["ceilings"]["copy_tb_s"] > 0
    assert written["ceilings_after"]["product_tflop_s"] > 0
    for row in written["rows"]:
        assert row["figures"]["bound.ms"] > 0
        assert {f"{name}.ms" for name in ("ours", "default", "eager")} <= row["figures"].keys()
        assert row["figures"]["ours.extra_gib"] is None  # nobody counts it on a CPU
        assert row["decisions"]["ours"]
        assert row["targets"]
    first = written["rows"][0]
    assert first["bytes"] == Case("rms_norm", (12, 32)).bytes("forward")
    assert first["decisions"]["default"][0].startswith("rms_norm/forward: ")
    assert document["summary"]["left"] == []


def test_a_run_out_of_time_keeps_what_it_has(tmp_path):
    document, _ = run(tmp_path, only=("rms_norm",), budget_s=-1.0)
    assert document["rows"] == []
    assert len(document["summary"]["left"]) == len([row for row in TABLE if row.case.op == "rms_norm"])
    assert not document["summary"]["passed"]
    assert json.loads((tmp_path / kernels.FILE).read_text())["summary"] == document["summary"]


def test_a_run_that_is_cut_has_written_each_case(tmp_path):
    seen = []

    def say(line):
        if line.startswith("["):
            seen.append(json.loads((tmp_path / kernels.FILE).read_text())["rows"])
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kernels.run(CPU, tmp_path, only=("rms_norm",), names=("eager",), scale="tiny", models=False, rounds=1, say=say)
    assert [len(rows) for rows in seen] == [2, 2, 3]  # the first case has two phases
    assert len(json.loads((tmp_path / kernels.FILE).read_text())["summary"]["left"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "huge"}, "no scale is called 'huge'"),
        ({"only": ("nothing",)}, "no row is called 'nothing'"),
        ({"names": ("nobody",)}, "no peer is called 'nobody'"),
    ],
)
def test_what_cannot_be_meant_raises(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **options)


def test_a_target_finds_its_own_row_and_others():
    table = [
        Row(Case("rms_norm", (2, 2)), "both", (share(0.8),)),
        Row(Case("rms_norm", (3, 3)), "both", (own("rms_norm both 2x2", 0.58),)),
    ]
    half = row_of(table[1].key, ours__ms=6.0)
    entries = [half]
    kernels.judge(entries, table)
    assert half["targets"][0]["verdict"] == "not measured"  # the other row is not there yet
    entries.append(row_of(table[0].key, ours__ms=10.0, bound__ms=9.0))
    kernels.judge(entries, table)
    assert [verdict["text"] for row in entries for verdict in row["targets"]] == ["short by 3.3%", "met"]
    figure = kernels.lookup(entries, half)
    assert figure("nowhere:ours.ms") is None
    assert figure("liger.ms") is None


def test_the_bound_is_that_of_the_size_that_was_measured():
    row = Row(Case("rms_norm", (16384, 4096)), "forward", (share(0.9),))
    small = Row(row.case.tiny(), "forward")
    result = Result(figures={"forward": {"ours.ms": 1.0}})
    found = kernels.entry(row, small, result, Ceilings(4.0, 700.0))
    assert found["key"] == "rms_norm forward 16384x4096"
    assert found["figures"]["bound.ms"] == pytest.approx(4 * 12 * 32 / 4e12 * 1e3)


def test_a_row_slower_than_liger_fails_the_run():
    met = {"verdict": "met"}
    equal = [row_of("a x", [met], ours__ms=1.005, liger__ms=1.0)]
    assert kernels.summary(equal, ())["passed"]
    slower = [*equal, row_of("b x", [met], ours__ms=1.2, liger__ms=1.0)]
    told = kernels.summary(slower, ())
    assert told["slower_than_liger"] == {"b x": pytest.approx(1.2)}
    assert not told["passed"]
    assert not kernels.summary(equal, ["left"])["passed"]


def test_what_tuning_is_worth_is_a_geometric_mean():
    rows = [
        row_of("a x", ours__ms=1.0, default__ms=2.0, other__ms=1.0),
        row_of("a y", ours__ms=1.0, default__ms=8.0),
        row_of("b x", ours__ms=2.0, default__ms=1.0, other__ms=-1.0),
        row_of("c x", default__ms=1.0),
    ]
    assert kernels.gains(rows, "default") == {"a": pytest.approx(4.0), "b": pytest.approx(0.5)}
    assert kernels.gains(rows, "other") == {"a": pytest.approx(1.0)}


def test_results_that_differ_are_named():
    rows = [row_of("a x", ours__error=0.001, cce__error=0.3, quack__error=float("nan"))]
    assert kernels.summary(rows, ())["differs"] == ["a x: cce", "a x: quack"]


def test_a_line_says_times_shares_and_verdicts():
    target = times("liger", 0.5)
    row = row_of("a x", bound__ms=1.0, ours__ms=2.0, liger__ms=4.0)
    row["targets"] = [target.judge(row["figures"].get).to_json()]
    assert kernels.line(row) == (
        "a x: bound 1.0000 | ours 2.0000 (50%)  liger 4.0000 (25%) | ours.ms / liger.ms <= 0.5: met"
    )


def test_the_command(tmp_path):
    asked = ["kernels", "--scale", "tiny", "--device", "cpu", "--only", "swiglu", "--peer", "ours,eager,other"]
    asked += ["--rounds", "1", "--no-models", "--other", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / kernels.FILE).read_text())["rows"]
    assert [row["key"] for row in rows] == ["swiglu forward 8192x14336", "swiglu backward 8192x14336"]
    assert rows[0]["failed"] == {}
    assert rows[0]["decisions"]["other"][0].startswith("swiglu/forward: any:")


def test_the_command_refuses_with_exit_code_2(tmp_path):
    done = CliRunner().invoke(app, ["kernels", "--only", "nothing", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "no row is called 'nothing'" in done.output
    assert not (tmp_path / kernels.FILE).exists()


@pytest.mark.slow
def test_every_row_runs_on_a_cpu(tmp_path):
    document, _ = run(tmp_path, models=True, names=("ours", "default", "eager"), rounds=1)
    assert not [row["failed"] for row in document["rows"] if row["failed"]]
    assert document["summary"]["differs"] == []
    assert {row.key for row in TABLE} <= {row["key"] for row in document["rows"]}
