"""Readers of data against damaged and hostile input: errors of the catalogue alone, nothing run, nothing written.

A short run of what ``python -m tests.fuzz.drive`` does for hours, everything that once failed, and hypothesis.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from random import Random

import drive
import pytest
import targets
from guarding import ViolationError, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from mutating import Mutator

from liger_registry.document import parse
from liger_registry.errors import TableInvalidError

FAILED_ONCE = sorted(targets.CORPUS.iterdir())


@pytest.mark.parametrize("path", FAILED_ONCE, ids=lambda path: path.name)
def test_what_failed_once(path, tmp_path):
    targets.target(path.name.partition("-")[0], tmp_path)(path.read_bytes())


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_short_run(name, tmp_path):
    check = targets.target(name, tmp_path)
    maker = Mutator(targets.seeds_of(name), Random(f"a short run of {name}"))
    with guarded(tmp_path):
        for seed in maker.seeds:
            check(seed)
        for _ in range(600):
            check(maker.make())


def test_inputs_reach_what_lies_behind_the_parser(tmp_path):
    check = targets.Tables(tmp_path)
    maker = Mutator(targets.seeds(), Random(0))
    for _ in range(1000):
        check.check(maker.make())
    assert check.accepted > 150
    assert check.partly > 50
    assert check.stores > 10
    assert check.exports > 10


# -- anything that JSON can say --------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
NAMES = st.sampled_from(
    [
        "schema",
        "op",
        "directory",
        "device",
        "decisions",
        "samples",
        "digest",
        "scheme",
        "phase",
        "dims",
        "dtypes",
        "flags",
        "config",
        "default",
        "provenance",
        "protocol",
        "implementation",
        "time_us",
        "status",
        "detail",
        "export",
        "tables",
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.dictionaries(NAMES, inner, max_size=6)
    ),
    max_leaves=20,
)
DOCUMENT = json.loads(targets.seeds()[2])


@st.composite
def documents(draw):
    """A good document in which some values, at any depth, are others."""
    document = json.loads(json.dumps(DOCUMENT))
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while True:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
                break
            place = place[key]
        place[key] = draw(VALUES)
    return document


@given(documents())
@settings(max_examples=80)
def test_any_document(document):
    try:
        found = parse(json.dumps(document))
    except TableInvalidError:
        return
    targets.holds_up(found)


@given(VALUES)
@settings(max_examples=60)
def test_any_json_as_a_problem_a_device_a_plan_and_a_space(value):
    data = json.dumps(value).encode()
    for check in (targets.problems, targets.devices, targets.plans, targets.spaces):
        check(data)


@given(st.text(max_size=60) | st.from_regex(r"(sm_|gfx|cuda:|h[0-9]00|interpreter:?)[0-9a-z:_-]{0,30}"))
@settings(max_examples=80)
def test_any_text_as_a_device(text):
    targets.devices(text.encode("utf-8", "surrogatepass"))


# -- time and memory -------------------------------------------------------------------------------------------------

HEAD = '{"schema": 1, "op": "x", "directory": "a/b/c", "device": {}, "samples": [], "decisions": ['


@pytest.mark.parametrize("unit", ["[]", "{}", "[[]]", "0", "999", "1.5", '"ab"', '{"a":0}', '{"dims":{}}', "null"])
def test_a_table_takes_a_bounded_multiple_of_its_size(unit):
    size = 1 << 15
    data = (HEAD + ",".join([unit] * (size // (len(unit) + 1))) + "]}").encode()
    tracemalloc.start()
    try:
        parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Each entry that is left out costs a text; what is read at all, ten to thirty times its size.
    assert peak < 80 * len(data)


def test_millions_of_empty_lists_are_refused_before_they_are_made():
    data = (HEAD + "[]," * 4_100_000 + "[]]}").encode()
    tracemalloc.start()
    try:
        with pytest.raises(TableInvalidError, match="no valid JSON") as caught:
            parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "4,000,000 lists and objects" in caught.value.why
    assert peak < 3 * len(data)


@pytest.mark.parametrize("depth", [500, 950, 990, 1_000_000])
@pytest.mark.parametrize("key", ["schema", "op", "directory", "device", "decisions", "samples", "digest", "export"])
def test_any_depth_anywhere(depth, key, tmp_path):
    nested = "[" * depth + "]" * depth
    text = json.dumps({**DOCUMENT, key: 0}).replace(f'"{key}": 0', f'"{key}": {nested}')
    check = targets.Tables(tmp_path)
    check.check(text.encode())
    check.as_export(text.encode())
    check.as_export(('{"export": 1, "tables": [' + text + "]}").encode())


# -- the tools themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda path: path.write_text("x"),
        lambda path: os.mkdir(path),
        lambda path: os.symlink("/etc", path),
        lambda path: os.rename(path.parent / "there", path),
        lambda path: os.remove(path.parent / "there"),
        lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
        lambda path: (path.parent / "inside" / "link").write_text("x"),
        lambda path: os.system("true"),
        lambda path: subprocess.run(["true"]),
        lambda path: eval("1"),
        lambda path: exec("pass"),
        lambda path: __import__("antigravity_that_is_not_there"),
    ],
)
def test_the_guard_sees(act, tmp_path):
    (tmp_path / "there").write_text("")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "target")
    # Whatever is raised is suppressed, as by a reader that survives anything.
    with pytest.raises(ViolationError), guarded(tmp_path / "inside"), suppress(BaseException):
        act(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "there"]


def test_the_guard_lets_reading_and_its_own_directory_pass(tmp_path):
    with guarded(tmp_path):
        (tmp_path / "new").write_text("x")
        os.replace(tmp_path / "new", tmp_path / "newer")
        Path(__file__).read_text()


def run(capfd, *arguments):
    code = drive.main(["--report-s", "1000", *arguments])
    captured = capfd.readouterr()
    return code, json.loads(captured.out.splitlines()[-1]), captured.err


def test_the_driver_counts_what_it_did(capfd, tmp_path):
    code, summary, _ = run(capfd, "--inputs", "1001", "--failures", str(tmp_path))
    assert code == 0
    assert (summary["inputs"], summary["finished"], summary["failures"]) == (1001, True, 0)
    code, summary, _ = run(capfd, "--inputs", str(10**12), "--seconds", "0", "--failures", str(tmp_path))
    assert summary["inputs"] < 10**12
    assert list(tmp_path.iterdir()) == []


def a_bug(data: bytes) -> None:
    if b"1e999" in data:
        raise KeyError("planted")


def a_hang(data: bytes) -> None:
    if b"1e999" in data:
        time.sleep(600)


def an_end(data: bytes) -> None:
    if b"1e999" in data:
        os._exit(3)


def a_leak(data: bytes) -> None:
    LEAKED.append(bytes(4 << 20))


LEAKED: list[bytes] = []


@pytest.mark.skipif(sys.platform == "win32", reason="the driver forks")
@pytest.mark.parametrize(
    ("check", "text"), [(a_bug, "planted"), (a_hang, "HangError"), (an_end, "exit code 3"), (a_leak, "MemoryError")]
)
def test_the_driver_finds_and_keeps_what_fails(check, text, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "target", lambda name, directory: check)
    monkeypatch.setattr(drive, "HANG_S", 1 if check is a_hang else 60)  # a leak takes its time on a busy machine
    code, summary, errors = run(capfd, "--inputs", "2000", "--processes", "1", "--failures", str(tmp_path))
    assert code == 1
    assert text in errors
    assert (summary["finished"], summary["failures"]) == (False, 1)
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("table-")
    if check in (a_bug, a_hang):
        assert b"1e999" in kept.read_bytes()
