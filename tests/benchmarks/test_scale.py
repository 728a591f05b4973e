"""The command ``scale``: groups of ranks that end in every way, what is kept of them, verdicts, tables and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import record, report, scale, scale_group
from benchmarks.__main__ import app

CPU = torch.device("cpu")
HERE = Path(__file__).parent


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Ranks that follow a script; which of them were started; and a run of them."""
    monkeypatch.setattr(scale_group, "COMMAND", (sys.executable, str(HERE / "scripted_rank.py")))
    monkeypatch.setattr(scale_group, "POLL_S", 0.02)
    script, started = tmp_path / "script.json", tmp_path / "started"
    monkeypatch.setenv("SCRIPT", str(script))
    monkeypatch.setenv("STARTED", str(started))

    class Scripted:
        out = tmp_path / "out"

        def run(self, told=None, **options):
            script.write_text(json.dumps(told or {}))
            started.write_text("")
            self.said = []
            given = {"scale": "tiny", "gpus": 2, "caps": (0,), "modes": ("hf", "ours"), "say": self.said.append}
            scale.run(CPU, self.out, **{**given, **options})
            return json.loads((self.out / scale.FILE).read_text())  # what was kept, not what was returned

        def groups(self):
            """The job, mode and lengths of each group that was started."""
            lines = [json.loads(line) for line in started.read_text().splitlines()]
            return [tuple(line[:3]) for line in lines if line[3] == 0]

        def environments(self):
            return {line[1]: tuple(line[4:6]) for line in map(json.loads, started.read_text().splitlines())}

        def processes(self):
            return [json.loads(line)[6] for line in started.read_text().splitlines()]

    return Scripted()


def cells(document):
    (row,) = document["rows"]
    return row["modes"]


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_the_run_is_that_of_the_claim():
    setup = scale.setup_of("full")
    assert (setup.batch, setup.lengths, setup.judged) == (8, (2048, 4096, 8192, 16384, 32768), 8192)
    told = {name: setup.config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    assert told == {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = setup.config["num_attention_heads"], setup.config["num_key_value_heads"]
    assert (setup.layers, *heads) == (32, 32, 8)
    assert (scale.MODES, scale.CAPS) == (("hf", "liger", "ours", "ours-low"), (0.0, 80.0))
    assert [target.text for target in scale.targets(8192)] == [
        "ours@8192.tokens_s / liger@8192.tokens_s >= 1.02",
        "ours@8192.peak_gib / liger@8192.peak_gib <= 1.08",
        "ours or ours-low.longest / liger.longest >= 1",
    ]


def test_other_numbers_are_taken():
    setup = scale.setup_of("full", layers=4, batch=2, lengths=(4096, 2048, 4096))
    assert (setup.layers, setup.batch, setup.lengths, setup.judged) == (4, 2, (2048, 4096), 8192)
    assert scale.FULL.layers == 32


@pytest.mark.parametrize(
    ("memory", "caps", "kept"),
    [
        (139.8, (0, 80), [0, 80]),
        (79.1, (0, 80), [0]),
        (79.1, (80,), [0]),  # nothing is taken away: the device as it is
        (None, (0, 80), [0]),
        (139.8, (40, 40, 80), [40, 80]),
    ],
)
def test_a_cap_takes_something_away(memory, caps, kept):
    assert list(scale._caps(caps, memory, lambda line: None)) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [({"modes": ("fast",)}, "'fast' is none of hf"), ({"scale": "huge"}, "'huge' is none of full")],
)
def test_what_is_unknown_raises(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        scale.run(CPU, tmp_path, **options)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def figure(tokens_s, peak_gib, ms=100.0):
    return {"tokens_s": tokens_s, "ms": ms, "peak_gib": peak_gib, "reserved_gib": peak_gib + 2, "losses": [4.0]}


OUT = {"oom": "OutOfMemoryError: CUDA out of memory.", "rank": 3}
LONGER = {"oom": "8192 did not fit", "implied": True}


def row_of(cap_gib=0.0, **modes):
    return {"gpus": 8, "layers": 32, "batch": 8, "cap_gib": cap_gib, "modes": modes, "longest": {}, "targets": []}


ROW = row_of(
    80.0,
    hf={"4096": figure(5000.0, 70.0), "8192": OUT, "16384": LONGER},
    liger={"4096": figure(7000.0, 30.0), "8192": figure(8000.0, 50.0), "16384": OUT},
    ours={"4096": figure(7100.0, 33.0), "8192": figure(8240.0, 55.0), "16384": OUT},
)
ROW["modes"]["ours-low"] = {"4096": figure(7000.0, 28.0), "8192": figure(8100.0, 48.0), "16384": figure(8e3, 78.0)}


def test_verdicts_of_a_row():
    told = {verdict["target"]: (verdict["value"], verdict["text"]) for verdict in scale.judge(ROW, 8192)}
    assert told == {
        "ours@8192.tokens_s / liger@8192.tokens_s >= 1.02": (1.03, "met"),
        "ours@8192.peak_gib / liger@8192.peak_gib <= 1.08": (1.1, "short by 1.8%"),
        "ours or ours-low.longest / liger.longest >= 1": (2.0, "met"),
    }
    assert scale.longest(ROW) == {"hf": 4096, "liger": 8192, "ours": 8192, "ours-low": 16384}


def test_a_mode_with_a_length_unanswered_has_no_longest():
    answered = {"4096": figure(1.0, 1.0), "8192": figure(1.0, 1.0)}
    row = row_of(liger=answered, ours={"4096": figure(1.0, 1.0)}, hf={"4096": OUT, "8192": {"failed": "x"}})
    assert scale.longest(row) == {"liger": 8192}
    assert scale.judge(row, 8192)[2]["text"] == "not measured"
    row["modes"]["ours"]["8192"] = OUT
    assert scale.judge(row, 8192)[2]["text"] == "below .9, short by 50.0%"
    row["modes"]["hf"] = {"4096": OUT, "8192": LONGER}
    assert scale.longest(row)["hf"] == 0


SAME = {"losses": [4.0, 3.0], "same": [2.0, 2.0]}


def found(**changes):
    dtypes = {name: {"hf": dict(SAME), "ours": dict(SAME), "logits": {}} for name in ("bfloat16", "float32")}
    return {"measured": [2, 2], "digests": ["a", "a"], **dtypes, **changes}


@pytest.mark.parametrize(
    ("dtype", "mode", "change", "message"),
    [
        ("bfloat16", "ours", {"losses": [4.1, 3.0]}, "bfloat16: the first loss is 4.100000, not 4.000000"),
        ("bfloat16", "ours", {"losses": [4.0, 3.4]}, "bfloat16: losses are off by 1.3e-01, limit 0.1"),
        ("bfloat16", "ours", {"losses": [4.0, float("nan")]}, "bfloat16: losses are off by inf"),
        ("float32", "ours", {"losses": [4.001, 3.0]}, "float32: the first loss is 4.001000, not 4.000000"),
        ("float32", "ours", {"losses": [4.0, 3.001]}, "float32: losses are off by 3.3e-04, limit 0.0001"),
        ("float32", "ours", {"same": [2.0, 2.00001]}, "float32, ours: ranks say different losses"),
        ("bfloat16", "hf", {"same": [2.0, 2.00001]}, "bfloat16, hf: ranks say different losses"),
    ],
)
def test_what_is_wrong_is_said(dtype, mode, change, message):
    assert scale.wrong(found()) == []
    planted = found()
    planted[dtype][mode] |= change
    (told,) = scale.wrong(planted)
    assert told.startswith(message)


def test_what_bf16_rounds_is_not_wrong():
    planted = found()
    planted["bfloat16"]["ours"] = {"losses": [4.03, 3.2], "same": [2.0, 2.000001]}
    assert scale.wrong(planted) == []


def test_plans_measurements_and_logits_are_held_too():
    planted = found(digests=["a" * 64, "b" * 64], measured=[0, 0])
    planted["float32"]["logits"] = {"model.py:12": 1}
    assert scale.wrong(planted) == [
        "ranks froze different plans: aaaaaaaaaaaa, bbbbbbbbbbbb",
        "the warmup measured nothing",
        "float32: logits were computed for model.py:12",
    ]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_each_mode_has_a_group_and_each_length_a_result(scripted):
    document = scripted.run({"speed": {"ours": 130.0}}, modes=("hf", "ours", "ours-low"))
    assert scripted.groups() == [
        ("check", None, None),
        ("cells", "hf", [16, 32]),
        ("cells", "ours", [16, 32]),
        ("cells", "ours-low", [16, 32]),
    ]
    assert document["checks"]["2"]["wrong"] == []
    assert {mode: cells(document)[mode]["32"]["tokens_s"] for mode in ("hf", "ours")} == {"hf": 100.0, "ours": 130.0}
    assert document["rows"][0]["longest"] == {"hf": 32, "ours": 32, "ours-low": 32}
    assert scripted.environments()["ours"] == (None, "0")
    assert scripted.environments()["ours-low"] == ("2GiB", "0")


def test_a_second_run_measures_nothing(scripted):
    first = scripted.run()
    second = scripted.run({"speed": {"ours": 5.0}})
    assert scripted.groups() == []
    assert second["rows"] == first["rows"]
    # Another mode, length or number of ranks is another thing, and the ranks are compared anew where they are others.
    scripted.run(modes=("hf", "ours", "ours-low"))
    assert scripted.groups() == [("cells", "ours-low", [16, 32])]
    scripted.run(modes=("hf",), lengths=(16, 64))
    assert scripted.groups() == [("cells", "hf", [64])]
    document = scripted.run(modes=("hf",), gpus=1)
    assert scripted.groups() == [("check", None, None), ("cells", "hf", [16, 32])]
    assert [row["gpus"] for row in document["rows"]] == [2, 1]


def test_another_commit_measures_anew(scripted, monkeypatch):
    scripted.run()
    monkeypatch.setattr(record, "commit", lambda: "another")
    scripted.run()
    assert len(scripted.groups()) == 3


def test_memory_that_is_short_is_a_result_and_the_next_mode_runs(scripted):
    short = {"rank": 1, "do": "oom", "text": "OutOfMemoryError: CUDA out of memory."}
    document = scripted.run({"hf@32": short}, lengths=(16, 32, 64))
    assert scripted.groups()[1:] == [("cells", "hf", [16, 32, 64]), ("cells", "ours", [16, 32, 64])]
    hf = cells(document)["hf"]
    assert hf["16"]["tokens_s"] == 100.0
    # The other rank noticed and failed; the cause is what is kept.
    assert hf["32"] == {"oom": "OutOfMemoryError: CUDA out of memory.", "rank": 1}
    assert hf["64"] == {"oom": "32 did not fit", "implied": True}
    assert [cell["tokens_s"] for cell in cells(document)["ours"].values()] == [100.0] * 3
    assert document["rows"][0]["longest"] == {"hf": 16, "ours": 64}
    scripted.run(lengths=(16, 32, 64))
    assert scripted.groups() == []  # it is a result, and not tried again


def test_a_model_that_does_not_fit_fits_at_no_length(scripted):
    document = scripted.run({"hf": {"rank": 0, "do": "oom", "text": "out of memory"}})
    assert all("oom" in cell for cell in cells(document)["hf"].values())
    assert document["rows"][0]["longest"] == {"hf": 0, "ours": 32}


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"rank": 1, "do": "die"}, "rank 1 ended with -9: a last word"),
        ({"rank": 1, "do": "failed", "text": "ValueError: planted"}, "rank 1: ValueError: planted"),
    ],
)
def test_a_rank_that_ends_is_named_with_its_message_and_longer_lengths_run(scripted, told, text):
    document = scripted.run({"hf@16": told})
    hf = cells(document)["hf"]
    assert hf["16"]["failed"] == text
    assert hf["32"]["tokens_s"] == 100.0
    assert any(text in line for line in scripted.said)
    assert "hf" not in document["rows"][0]["longest"]
    # A failure is no result: the next run tries it again, and that alone.
    document = scripted.run()
    assert scripted.groups() == [("cells", "hf", [16])]
    assert cells(document)["hf"]["16"]["tokens_s"] == 100.0


def test_a_mode_that_cannot_begin_is_not_begun_again(scripted):
    told = {"rank": 0, "do": "failed", "text": "ModuleNotFoundError: No module named 'liger_kernel'"}
    document = scripted.run({"liger": told}, modes=("liger", "ours"))
    assert scripted.groups()[1:] == [("cells", "liger", [16, 32]), ("cells", "ours", [16, 32])]
    assert {cell["failed"] for cell in cells(document)["liger"].values()} == {f"rank 0: {told['text']}"}


def test_a_length_that_takes_too_long_is_ended_with_all_its_processes(scripted):
    document = scripted.run({"hf@16": {"rank": 0, "do": "hang"}}, limit_s=1.0)
    assert {length: cell["failed"] for length, cell in cells(document)["hf"].items()} == {"16": "no result after 1 s"}
    assert cells(document)["ours"]["32"]["tokens_s"] == 100.0
    assert len(scripted.processes()) == 6
    for process in scripted.processes():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ({"digests": ["a", "b"]}, "ranks froze different plans: a, b"),
        ({"check": {"rank": 1, "do": "die"}}, "rank 1 ended with -9: a last word"),
    ],
)
def test_nothing_is_measured_where_the_comparison_fails(scripted, script, wrong):
    document = scripted.run(script)
    assert document["checks"]["2"]["wrong"] == [wrong]
    assert scripted.groups() == [("check", None, None)]
    asked = ["scale", "--device", "cpu", "--scale", "tiny", "--out", str(scripted.out), "--mode", "ours"]
    assert CliRunner().invoke(app, asked).exit_code == 1
    assert cells(scripted.run())["ours"]["16"]["tokens_s"] == 100.0  # the comparison is made again


def test_the_command_takes_its_options(scripted):
    scripted.run()
    asked = ["scale", "--device", "cpu", "--scale", "tiny", "--out", str(scripted.out), "--gpus", "1", "--layers", "3"]
    asked += ["--length", "8", "--length", "16", "--mode", "hf,ours", "--batch", "5", "--cap-gib", "0", "--steps", "7"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    row = json.loads((scripted.out / scale.FILE).read_text())["rows"][1]
    assert {name: row[name] for name in ("gpus", "layers", "batch", "cap_gib")} == {
        "gpus": 1,
        "layers": 3,
        "batch": 5,
        "cap_gib": 0.0,
    }
    assert {mode: list(lengths) for mode, lengths in row["modes"].items()} == {m: ["8", "16"] for m in ("hf", "ours")}
    assert row["modes"]["hf"]["8"]["steps"] == 7
    assert "ranks 1, layers 3, batch 5: tok/s a GPU, peak" in done.output
    assert "longest" in done.output


# -- what is shown -----------------------------------------------------------------------------------------------------


def document_of(*rows):
    about = {
        "device": {"type": "cuda", "name": "NVIDIA H200", "memory_gib": 139.8},
        "versions": {"torch": "2.11.0"},
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "scale": "full",
    }
    for row in rows:
        row["longest"], row["targets"] = scale.longest(row), scale.judge(row, 8192)
    checks = {"8": {"wrong": []}}
    return {"command": "scale", "about": about, "judged": 8192, "checks": checks, "rows": list(rows)}


FAILED = row_of(liger={"8192": {"failed": "rank 0: ValueError: planted", "log": []}})


def test_the_table():
    said = StringIO()
    console = Console(file=said, width=120)
    for table in scale.tables(document_of(ROW, FAILED)):
        console.print(table)
    lines = said.getvalue().splitlines()
    assert "ranks 8, 80 GiB each, layers 32, batch 8: tok/s a GPU, peak" in lines
    told = [[part.strip() for part in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert told == [
        ["4,096", "5,000, 70.0 GiB", "7,000, 30.0 GiB", "7,100, 33.0 GiB", "7,000, 28.0 GiB"],
        ["8,192", "out of memory", "8,000, 50.0 GiB", "8,240, 55.0 GiB", "8,100, 48.0 GiB"],
        ["16,384", "out of memory", "out of memory", "out of memory", "8,000, 78.0 GiB"],
        ["longest", "4,096", "8,192", "8,192", "16,384"],
        ["8,192", "failed"],
        ["longest", ""],
    ]
    assert "ours@8192.tokens_s / liger@8192.tokens_s >= 1.02: met" in lines


def test_the_report(tmp_path):
    record.write(tmp_path / scale.FILE, document_of(ROW, FAILED))
    (path,) = report.run(tmp_path, tmp_path / "out", plots=False)
    lines = path.read_text().splitlines()
    assert "### Ranks 8, 80 GiB each, layers 32, batch 8" in lines
    assert "Checked on 8 ranks: the plain model's losses, one plan." in lines
    assert "| 8,192 | ours | 8,240 | 1.030 | 100.0 | 55.0 | 57.0 |" in lines
    assert "| 16,384 | ours-low | 8,000 |  | 100.0 | 78.0 | 80.0 |" in lines  # liger-kernel's did not fit
    assert "| 16,384 | liger | out of memory |  |  |  |  |" in lines
    assert "| 8,192 | liger | rank 0: ValueError: planted |  |  |  |  |" in lines
    (longest,) = [line for line in lines if line.startswith("Longest that fits: hf 4,096")]
    assert "hf 4,096, liger 8,192, ours 8,192, ours-low 16,384. " in longest
    assert "ours or ours-low.longest / liger.longest >= 1: met (2)" in longest
    tables = [block.splitlines() for block in path.read_text().split("\n\n") if block.startswith("|")]
    assert [len({line.count("|") for line in table}) for table in tables] == [1, 1]


@pytest.mark.ci
def test_the_plot(tmp_path):
    record.write(tmp_path / scale.FILE, document_of(ROW, FAILED))
    # In a process of its own: matplotlib warns of what it imports.
    code = "import sys; from pathlib import Path; from benchmarks import report; "
    code += "print(*(p.name for p in report.run(Path(sys.argv[1]), Path(sys.argv[2]))))"
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=record.ROOT)
    name = "scale-8x-32layers-batch8-cap80.png"
    assert done.stdout.split() == ["report.md", name]  # what has no figure has no plot
    assert (tmp_path / "out" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"]({name})" in (tmp_path / "out" / report.FILE).read_text()
