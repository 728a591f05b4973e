"""Warmup: what it measures, that a second run measures nothing, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liger_registry.problem import Problem


def test_it_measured_what_the_model_asks_for(warmed_once: Path) -> None:
    report = json.loads((warmed_once / "report.json").read_text())
    rows = {(row["phase"], row["dims"]["rows"], row["dims"]["hidden"]): row for row in report["rows"]}
    assert set(rows) == {(p, r, h) for p in ("forward", "backward") for r, h in [(8, 32), (16, 16), (8, 16)]}
    for row in report["rows"]:
        assert row["status"] in ("tuned", "default", "noisy")
        assert row["choice"]["implementation"]
        assert row["default"]["implementation"]
        assert row["time_us"] > 0
        assert row["measured"] > 0
        assert row["flags"].get("needs", "x,weight") == "x,weight"
    assert report["directory"].startswith(str(warmed_once / "cache"))
    assert list(Path(report["directory"]).glob("rms_norm.json"))


def test_the_second_run_measures_nothing_and_is_fast(warmed: Path, model: Path, tune_json: Callable[..., Any]) -> None:
    from .conftest import WARMUP

    began = time.monotonic()
    report = tune_json("warmup", model, *WARMUP)
    assert time.monotonic() - began < 10
    assert report["measured"] == 0
    assert {row["status"] for row in report["rows"]} == {"reused"}
    assert all(row["choice"] for row in report["rows"])


def test_the_table_for_people(warmed: Path, model: Path, tune: Callable[..., Any]) -> None:
    from .conftest import WARMUP

    text = tune("warmup", model, *WARMUP).stdout
    said, shared, _, columns, _, *rows, last = text.splitlines()
    assert "tiny-model, batch 2, seq 4, on cpu/" in said
    assert shared == "all: rms_norm, float32, casting llama, needs x,weight"
    assert columns.split() == ["phase", "hidden", "x", "rows", "chosen", "time", "default", "gain", "status"]
    # Forward first, and then by size; a long config goes on in a line of its own.
    cells = [row.split() for row in rows if row.strip().startswith(("forward", "backward"))]
    assert [cell[0] for cell in cells] == ["forward"] * 3 + ["backward"] * 3
    assert [cell[1:4] for cell in cells[:3]] == [["16", "x", "8"], ["16", "x", "16"], ["32", "x", "8"]]
    assert max(map(len, text.splitlines()[1:-1])) <= 100
    assert "6 problems" in last
    assert "6 reused" in last
    assert str(warmed) in last


def test_rows_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    from liger_registry.cli import _report
    from liger_registry.config import Config, Fields
    from liger_registry.table import Choice
    from liger_registry.tuning.report import Row

    config = Config(block_cols=4096, block_rows=16, num_stages=3, num_warps=16, splits=8)
    choice, default = Choice("cuda:column_split", config), Choice("cuda:row", Config(num_warps=8))

    def row(rows: int, weight: str, phase: str, status: str, casting: str) -> Row:
        flags = Fields(casting=casting, **({"needs": "x,weight"} if phase == "backward" else {}))
        sizes = Fields(rows=rows, hidden=16384)
        problem = Problem("rms_norm", "default", phase, sizes, Fields(x="bfloat16", weight=weight), flags)
        chosen = default if status == "default" else choice
        return Row(problem, status, chosen, default, 1480.0, 2100.0, detail="because")

    rows = [
        row(1048576, "bfloat16", "backward", "tuned", "gemma"),
        row(1048576, "none", "forward", "default", "gemma"),
        row(8192, "float32", "forward", "failed", "llama"),
    ]
    _report.print_rows(rows, ("failed",))
    text = capsys.readouterr().out
    assert text.startswith("all: rms_norm, needs x,weight\n")
    assert max(map(len, text.splitlines())) <= 100
    assert "kept" in text
    assert _report._parts(rows[1].problem)["dtype"] == "bfloat16, no weight"
    for part in ("float32, x", "1.42x", "1.48 ms", "2.1 ms"):
        assert part in text
    assert "failed: forward hidden 16384 rows 8192 weight float32, x bfloat16 llama: because" in text
    _report.print_rows([], ())
    assert capsys.readouterr().out == ""


def test_frozen_weights_are_other_problems(model: Path, tune_json: Callable[..., Any]) -> None:
    # No time for any: what would be measured is in the report all the same.
    report = tune_json(
        "warmup", model, "--frozen", "--op", "rms_norm", "--device", "cpu", "--seq", 8, "--budget-s", 1e-9, code=1
    )
    assert {row["flags"]["needs"] for row in report["rows"] if row["phase"] == "backward"} == {"x"}
    assert {row["status"] for row in report["rows"]} == {"untuned"}


def test_what_the_time_did_not_suffice_for_is_said(model: Path, tune: Callable[..., Any]) -> None:
    result = tune("warmup", model, "--op", "rms_norm", "--device", "cpu", "--seq", 8, "--budget-s", 1e-9, code=1)
    assert "untuned: forward hidden 32 rows 8: the time was up" in result.stdout


def test_on_a_cpu_the_default_set_ends_in_time_and_that_is_no_failure(
    tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_registry.cli import warmup

    monkeypatch.setattr(warmup, "CPU_BUDGET_S", 1e-9)
    text = tune("warmup", "--op", "rms_norm", "--device", "cpu").stdout
    assert text.startswith("no model given: qwen3-0.6b, batch 1, seq 128 and 512, on cpu/")
    assert "untuned: forward hidden 1024 rows 512 float32: the time was up" in text


def test_misses_are_tuned(warmed: Path, tune_json: Callable[..., Any]) -> None:
    from liger_registry.device import Device
    from liger_registry.misses import MissLog
    from liger_registry.runtime import Registry

    fingerprint = Device.parse("cpu").fingerprint
    known = next(iter(Registry().user_store.load(Device.parse("cpu"), "rms_norm").problems))
    log = MissLog(Registry().misses.path)
    log.add(fingerprint, known)
    log.add("cuda/sm_90/h200-132", known.having(rows=4))
    log.add(fingerprint, Problem("no_such_op", "default", "forward", known.dims, known.dtypes, known.flags))
    report = tune_json("warmup", "--from-misses", "--device", "cpu")
    assert [(row["op"], row["dims"]) for row in report["rows"]] == [("rms_norm", dict(known.dims))]


def test_without_misses_there_is_nothing_to_tune(tune: Callable[..., Any]) -> None:
    assert "nothing to tune" in tune("warmup", "--from-misses", "--device", "cpu").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-model",),
        ("--seq", "0"),
        ("--batch", "x"),
        ("--dtype", "int8"),
        ("--op", "no_such_op"),
        ("--device", "no-such-device"),
        ("--device", "h100"),
        ("--budget-s", "0"),
        ("--budget-s", "nan"),
        ("--from-misses", "llama-3-8b"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: tuple[str, ...], tune: Callable[..., Any]) -> None:
    result = tune("warmup", *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


def test_a_cache_that_cannot_be_written_is_found_out_first(cache: Path, model: Path, tune: Callable[..., Any]) -> None:
    cache.write_text("a file where the directory should be")
    result = tune("warmup", model, "--device", "cpu", code=3)
    assert "could not be kept" in result.stderr


@pytest.mark.dist
def test_two_ranks_share_the_work(tmp_path: Path, model: Path) -> None:
    from .conftest import WARMUP

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LIGER_TUNE_CACHE_DIR": str(tmp_path / f"cache-{rank}"),
        }
        command = [sys.executable, "-m", "liger_registry.cli", "warmup", str(model), *WARMUP, "--json"]
        ranks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True))
    outputs = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    report = json.loads(outputs[0][0])
    assert outputs[1][0] == ""
    assert len(report["rows"]) == 6
    assert all(row["measured"] for row in report["rows"])
    tables = [next((tmp_path / f"cache-{rank}").glob("v1/*/*/*/rms_norm.json")) for rank in range(2)]
    decided = [len(json.loads(table.read_text())["decisions"]) for table in tables]
    assert decided == [6, 6]
