"""The command ``report``: tables from results, and plots."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import host, kernels, preference, record, report, train
from benchmarks.__main__ import app

ABOUT = {
    "device": {"type": "cuda", "name": "NVIDIA H200"},
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "abc",
    "scale": "full",
    "absent": {"quack": "not installed"},
}
MET = {"target": "bound.ms / ours.ms >= 0.9", "value": 0.95, "text": "met", "verdict": "met"}


def kernel(op, shape, bound, flops=0, bytes=0, phase="forward", targets=(MET,), failed=None, **ms):
    figures = {"bound.ms": bound, **{f"{name}.ms": value for name, value in ms.items()}, "ours.extra_gib": 1.5}
    return {
        "key": f"{op} {phase} {shape}",
        "op": op,
        "phase": phase,
        "variant": "",
        "bytes": bytes,
        "flops": flops,
        "figures": figures,
        "failed": failed or {},
        "targets": list(targets),
    }


KERNELS = {
    "command": "kernels",
    "about": ABOUT,
    "ceilings": {"copy_tb_s": 4.27, "product_tflop_s": 750.0},
    "summary": {
        "targets": "2 of 2 met (100%), 0 below .9, 0 not measured",
        "slower_than_liger": {"rms_norm forward 1x1": 1.25},
        "gain_over_default": {"rms_norm": 1.1},
        "gain_over_other": {},
        "differs": [],
        "left": ["one", "two"],
    },
    "rows": [
        kernel("rms_norm", "16384x4096", 0.095, bytes=1 << 28, ours=0.1, liger=0.2, eager=None),
        kernel("rms_norm", "32768x4096", 0.19, bytes=1 << 29, ours=0.2, liger=0.25, failed={"eager": "broken"}),
        kernel("linear_logp", "N1 H2 V3", 40.0, phase="both", flops=10**13, targets=(), ours=50.0),
    ],
}
HOST = {
    "command": "host",
    "about": ABOUT,
    "problem": {"rows": 16, "width": 4096},
    "us": {"grad": {"ours": 20.0, "eager": 12.0}, "no grad": {"ours": 15.0, "eager": 10.0}},
    "import_ms": 1.5,
    "targets": [{"target": "ours.us <= 22", "value": 20.0, "text": "met"}],
}
PREFERENCE = {
    "command": "preference",
    "about": ABOUT,
    "sizes": {"sequences": 8},
    "rows": [
        {
            "loss": "orpo",
            "ignored": 0.5,
            "figures": {"bound.ms": 20.0, "ours.ms": 25.0, "ours.extra_gib": None, "liger.ms": 50.0},
            "failed": {},
            "targets": [{"target": "ours.ms / liger.ms <= 0.55", "value": 0.5, "text": "met"}],
        }
    ],
}
TRAIN = {
    "command": "train",
    "about": ABOUT,
    "rows": [
        {
            "model": "qwen3-0.6b",
            "batch": 4,
            "length": 4096,
            "targets": [{"target": "ours.tokens_s / liger.tokens_s >= 1.2", "value": None, "text": "not measured"}],
            "modes": {
                "hf": {"tokens_s": 50000.0, "ms": 320.0, "peak_gib": 62.0, "first_s": 2.0},
                "ours": {"tokens_s": 90000.0, "ms": 180.0, "peak_gib": 23.0, "first_s": 3.0},
                "liger": {"failed": "ModuleNotFoundError: No module named 'liger_kernel'"},
            },
        }
    ],
}


@pytest.fixture
def results(tmp_path):
    place = tmp_path / "in"
    for name, content in (
        (kernels.FILE, KERNELS),
        (host.FILE, HOST),
        (preference.FILE, PREFERENCE),
        (train.FILE, TRAIN),
    ):
        record.write(place / name, content)
    return place


def test_every_result_has_its_part(results, tmp_path):
    (path,) = report.run(results, tmp_path / "out", plots=False)
    lines = path.read_text().splitlines()
    assert "| row | bound ms | ours | eager | liger | targets |" not in lines  # eager has no figure at all
    assert "| row | bound ms | ours | liger | targets |" in lines
    assert (
        "| rms_norm forward 16384x4096 | 0.095 | 0.1 (95%) | 0.2 (48%) | bound.ms / ours.ms >= 0.9: met (0.95) |"
        in lines
    )
    assert "| linear_logp both N1 H2 V3 | 40 | 50 (80%), 1.50 GiB |  |  |" in lines
    assert "Copy 4.27 TB/s, product 750 TFLOP/s." in lines
    assert "Absent: quack (not installed)." in lines
    assert "Slower than liger-kernel: rms_norm forward 1x1 1.25." in lines
    assert "Times without tables over those from the tables: rms_norm 1.10." in lines
    assert "Not measured: 2 rows." in lines
    assert "| grad | 20.00 | 12.00 |" in lines
    assert "| orpo | 50% | 20.0 | 25.0 ms | 50.0 ms |  | 0.50 |" in lines
    assert "- orpo, 50% ignored: ours.ms / liger.ms <= 0.55: met (0.5)" in lines
    assert "| ours | 90,000 | 1.80 | 180.0 | 23.0 | 3.0 |" in lines
    assert any(line.startswith("| liger | ModuleNotFoundError") for line in lines)
    assert any("NVIDIA H200" in line and "torch 2.11.0" in line and "commit abc" in line for line in lines)


def test_tables_have_as_many_cells_as_heads(results, tmp_path):
    (path,) = report.run(results, tmp_path / "out", plots=False)
    tables = [block.splitlines() for block in path.read_text().split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, table[0]


def test_a_directory_without_results_raises(tmp_path):
    with pytest.raises(ValueError, match="holds none of kernels"):
        report.run(tmp_path, tmp_path / "out")


def test_the_command_says_what_it_wrote(results, tmp_path):
    done = CliRunner().invoke(app, ["report", str(results), "--out", str(tmp_path / "out"), "--no-plots"])
    assert done.exit_code == 0, done.output
    assert done.output.split() == [str(tmp_path / "out" / report.FILE)]


@pytest.mark.ci
def test_plots(results, tmp_path):
    # In a process of its own: matplotlib warns of what it imports.
    code = "import sys; from pathlib import Path; from benchmarks import report; "
    code += "print(*(p.name for p in report.run(Path(sys.argv[1]), Path(sys.argv[2]))))"
    command = [sys.executable, "-c", code, str(results), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=record.ROOT)
    # One size alone has no time against size.
    names = ["report.md", "rms_norm-share.png", "rms_norm-time.png", "linear_logp-share.png"]
    assert done.stdout.split() == names
    for name in names[1:]:
        assert (tmp_path / "out" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert f"]({name})" in (tmp_path / "out" / report.FILE).read_text()


def test_results_are_plain_json_and_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "kernels.json"
    record.write(path, {"command": "kernels", "a": float("nan"), "b": [float("inf"), 1.5], "c": ("x",)})
    assert json.loads(path.read_text()) == {"command": "kernels", "a": None, "b": [None, 1.5], "c": ["x"]}
    assert record.read(path)["c"] == ["x"]
    monkeypatch.setattr(record.json, "dumps", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record.write(path, {"command": "other"})
    assert record.read(path)["command"] == "kernels"
    assert [p.name for p in path.parent.iterdir()] == ["kernels.json"]


def test_what_is_no_result_raises(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no result"):
        record.read(tmp_path / "x.json")


def test_a_commit_can_be_told_where_there_is_no_repository(monkeypatch):
    monkeypatch.setattr(record, "_said", lambda command: "")
    assert record.commit() == "unknown"
    monkeypatch.setenv("LIGER_BENCHMARKS_COMMIT", "abc")
    assert record.commit() == "abc"
    monkeypatch.setattr(record, "_said", lambda command: "def" if "rev-parse" in command else "")
    assert record.commit() == "def"
    monkeypatch.setattr(record, "_said", lambda command: "def" if "rev-parse" in command else " M file")
    assert record.commit() == "def+changes"
