"""The log of misses: each problem once, bounded, and never a reason to fail."""

from __future__ import annotations

import json
import os
import stat
import threading
import warnings

import fakes
import pytest

from liger_registry import misses
from liger_registry.errors import TableWarning
from liger_registry.misses import MissLog


def test_each_problem_is_written_once(tmp_path):
    path = tmp_path / "cache" / "misses.jsonl"
    log, one, two = MissLog(path), fakes.problem(rows=1), fakes.problem(rows=2)
    assert log.all() == []
    assert not path.exists()
    for problem in (two, one, two):
        log.add("cpu/a/b", problem)
    log.add("cpu/a/c", one)
    expected = [("cpu/a/b", two), ("cpu/a/b", one), ("cpu/a/c", one)]
    assert log.all() == expected
    assert MissLog(path).all() == expected
    assert len(path.read_text().splitlines()) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_ranks_that_miss_the_same_write_it_once(tmp_path):
    path = tmp_path / "misses.jsonl"
    logs = [MissLog(path) for _ in range(4)]
    assert [log.all() for log in logs] == [[]] * 4  # all of them have looked before any has written
    for log in logs:
        for rows in (1, 2):
            log.add("a/b/c", fakes.problem(rows=rows))
    assert len(path.read_text().splitlines()) == 2
    logs[0].clear()
    logs[1].add("a/b/c", fakes.problem(rows=3))
    assert [problem.rows for _, problem in MissLog(path).all()] == [3]


def test_a_later_run_goes_on(tmp_path):
    path = tmp_path / "misses.jsonl"
    MissLog(path).add("a/b/c", fakes.problem(rows=1))
    later = MissLog(path)
    later.add("a/b/c", fakes.problem(rows=1))
    later.add("a/b/c", fakes.problem(rows=2))
    assert len(path.read_text().splitlines()) == 2
    later.clear()
    assert later.all() == []
    assert not path.exists()
    later.clear()
    later.add("a/b/c", fakes.problem(rows=2))
    assert MissLog(path).all() == [("a/b/c", fakes.problem(rows=2))]


def test_lines_that_are_not_ours_are_passed_over(tmp_path):
    path = tmp_path / "misses.jsonl"
    log = MissLog(path)
    log.add("a/b/c", fakes.problem())
    good = path.read_text()
    entry = {"device": "d", "op": "o", "scheme": "s", "phase": "forward", "dims": {}, "dtypes": {}, "flags": {}}
    lines = [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        '{"device": "x"}',
        good[:40],
        "\x00\xff",
        "[" * 100_000,
        json.dumps({**entry, "dims": {"a": -1}}),
        json.dumps({**entry, "flags": {"a": float("nan")}}),
    ]
    path.write_bytes("\n".join([*lines, good]).encode("latin-1"))
    assert MissLog(path).all() == [("a/b/c", fakes.problem())]


def test_the_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(misses, "MOST", 5)
    path = tmp_path / "misses.jsonl"
    log = MissLog(path)
    for rows in range(1, 20):
        log.add("a/b/c", fakes.problem(rows=rows))
    assert len(log.all()) == len(MissLog(path).all()) == 5
    path.write_text(path.read_text() * 10)
    monkeypatch.setattr(misses, "MOST_BYTES", 1000)
    assert len(MissLog(path).all()) <= 5
    size = path.stat().st_size
    fresh = MissLog(path)
    fresh.add("x/y/z", fakes.problem(rows=1))
    assert path.stat().st_size == size


def test_threads_and_two_logs_on_one_file(tmp_path):
    logs = [MissLog(tmp_path / "misses.jsonl") for _ in range(2)]

    def add(number):
        for rows in range(1, 30):
            logs[number % 2].add("a/b/c", fakes.problem(rows=rows, hidden=number // 2 + 1))

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(MissLog(tmp_path / "misses.jsonl").all()) == 4 * 29


def test_what_cannot_be_written_is_one_warning(tmp_path):
    tmp_path.joinpath("file").write_text("")
    log = MissLog(tmp_path / "file" / "misses.jsonl")
    with pytest.warns(TableWarning, match="misses cannot be recorded"):
        log.add("a/b/c", fakes.problem(rows=1))
    for rows in (2, 3):  # a second warning would be an error
        log.add("a/b/c", fakes.problem(rows=rows))
    assert len(log.all()) == 3


def test_a_directory_or_a_link_in_its_place(tmp_path):
    tmp_path.joinpath("misses.jsonl").mkdir()
    tmp_path.joinpath("victim").write_text("text")
    os.symlink(tmp_path / "victim", tmp_path / "link.jsonl")
    for name in ("misses.jsonl", "link.jsonl"):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            MissLog(tmp_path / name).add("a/b/c", fakes.problem())
    assert tmp_path.joinpath("victim").read_text() == "text"


@pytest.mark.timeout(20)
def test_a_pipe_in_its_place_keeps_nobody_waiting(tmp_path):
    path = tmp_path / "misses.jsonl"
    os.mkfifo(path)
    log = MissLog(path)
    assert log.all() == []
    with pytest.warns(TableWarning, match="misses cannot be recorded"):
        log.add("a/b/c", fakes.problem(rows=1))
    log.add("a/b/c", fakes.problem(rows=2))
    assert len(log.all()) == 2


@pytest.mark.timeout(20)
def test_a_pipe_that_somebody_reads_is_no_log_either(tmp_path):
    path = tmp_path / "misses.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.warns(TableWarning, match="no regular file"):
            MissLog(path).add("a/b/c", fakes.problem(rows=1))
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_what_cannot_be_cleared_is_one_warning(tmp_path):
    path = tmp_path / "misses.jsonl"
    path.mkdir()
    log = MissLog(path)
    with pytest.warns(TableWarning, match="misses cannot be cleared"):
        log.clear()
    log.clear()  # a second warning would be an error
    assert log.all() == []
