"""The command line against hostile arguments and files: an exit code that is documented, no traceback, nothing outside.

Everything runs in this process over a cache of its own, watched by a guard: files may change below the cache and the
output directory alone, and nothing may be started.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
import targets
from guarding import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from mutating import Mutator
from typer.testing import CliRunner

from liger_registry.document import render
from liger_registry.store import TableStore

FILES = ("good.json", "sealed.json", "changed.json", "tables", "nothing", "text", "pipe", "deep.json", "link", "loop")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A cache, an output directory, and files of every kind."""
    root = tmp_path_factory.mktemp("line")
    for name in ("cache", "out", "nothing", "tables"):
        (root / name).mkdir()
    good, sealed = targets.exports()
    (root / "good.json").write_bytes(good)
    (root / "sealed.json").write_bytes(sealed)
    (root / "changed.json").write_bytes(sealed.replace(b"9.5", b"1.5", 1))
    (root / "text").write_text("no table")
    (root / "deep.json").write_text("[" * 100_000)
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to(root / "good.json")
    (root / "loop").symlink_to(root / "loop")
    store = TableStore(root / "tables")
    store.record(targets.DEVICE, targets.OP, [targets.stored()], [targets.sample()])
    TableStore(root / "cache").record(targets.DEVICE, targets.OP, [targets.stored(1024)], [targets.sample("wrong")])
    # A first look at everything imports what later ones must find imported.
    for verb in ("list", "doctor", "plugins"):
        run(root, verb, watched=False)
    run(root, "explain", "rms_norm", "--hidden", "8", "--rows", "8", "--device", "h200", watched=False)
    run(root, "import", str(root / "good.json"), watched=False)
    run(root, "prune", "--stale", watched=False)
    return root


def run(root: Path, *arguments: str, watched: bool = True) -> int:
    """Run the command; the exit code."""
    from liger_registry import runtime
    from liger_registry.cli import app

    before, written = runtime.registry, sys.dont_write_bytecode
    os.environ["LIGER_TUNE_CACHE_DIR"] = str(root / "cache")
    runtime.registry, sys.dont_write_bytecode = runtime.Registry(), True
    try:
        watch = guarded(root / "cache", root / "out", imports=True) if watched else nullcontext()
        with warnings.catch_warnings(), watch:
            warnings.simplefilter("ignore")
            done = CliRunner().invoke(app, list(arguments))
    finally:
        runtime.registry, sys.dont_write_bytecode = before, written
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError("".join(traceback.format_exception(done.exception))[-3000:])
    assert "Traceback" not in done.output
    assert done.exit_code in range(6)
    return done.exit_code


HOSTILE = st.sampled_from(
    [
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1e999",
        "nan",
        "9" * 5000,
        "../../etc",
        "/etc/passwd",
        "/proc/self/mem",
        "/dev/zero",
        "$(true)",
        "`true`",
        "%s%n",
        "\x1b[2J",
        "\u202e",
        "é",
        "\udcff",
        "a" * 5000,
        "h200",
        "cpu",
        "cuda:0",
        "rms_norm",
        "rms_norm,rms_norm",
        "x=y",
        "=",
        "x=bfloat16",
        "bfloat16",
        "forward",
        "user",
        "12",
        "1,2,,3",
        "7d",
        "0d",
        "-7d",
        "sm_90-1u-1g",
        "interpreter:rocm",
        "none",
        "true",
        "{}",
        "[",
        "import os",
        "*",
        "~",
        "\n",
        "--help",
        "--json",
    ]
)
OPTIONS = {
    "list": ("--op", "--device", "--store", "--json"),
    "explain": ("--device", "--dtype", "--phase", "--hidden", "--rows", "--json"),
    "export": ("--op", "--device", "--all-stores", "--decisions-only", "--json"),
    "import": ("--yes", "--replace", "--json"),
    "merge": ("--output", "--json"),
    "prune": ("--op", "--device", "--stale", "--older-than", "--yes", "--json"),
    "plugins": ("--json",),
    "doctor": ("--json",),
    "no-such-verb": (),
    # These would run for long; what cannot be a device ends them where their arguments have been looked at.
    "warmup": ("--batch", "--seq", "--dtype", "--op", "--budget-s", "--from-misses", "--force", "--json"),
    "verify": ("--op", "--dtype", "--configs", "--seed", "--implementation", "--json"),
    "compile": ("--op", "--dtype", "--processes", "--sample", "--json"),
}
LONG = ("warmup", "verify", "compile")


@st.composite
def command_lines(draw):
    verb = draw(st.sampled_from(sorted(OPTIONS)))
    line = [verb]
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            line.append(draw(HOSTILE))
        elif kind == 1:
            line.append(f"FILE:{draw(st.sampled_from(FILES))}")
        elif OPTIONS[verb]:
            line.append(draw(st.sampled_from(OPTIONS[verb])))
            if kind == 2:
                line.append(draw(HOSTILE | st.sampled_from(["OUT:x.json", "OUT:new/x.json", "OUT:"])))
    return [*line, "--device", "no-such-device"] if verb in LONG else line


def check_line(place, line):
    line = [part.replace("FILE:", f"{place}/").replace("OUT:", f"{place}/out/") for part in line]
    # `export ANYTHING` writes where it is told to: into the output directory, then.
    if line[0] in ("export", "merge"):
        line = [
            part if part.startswith(("-", str(place))) else f"{place}/out/{part[:40]}" for part in line[:1] + line[1:]
        ]
        line[0] = line[0].rpartition("/")[2]
    run(place, *line)


@given(command_lines())
@settings(max_examples=15)
def test_any_line(place, line):
    check_line(place, line)


@pytest.mark.ci
@given(command_lines())
@settings(max_examples=120)
def test_many_lines(place, line):
    check_line(place, line)


# -- import ----------------------------------------------------------------------------------------------------------


def outside(place: Path) -> dict[str, object]:
    return {str(p): p.lstat().st_mtime_ns for p in place.rglob("*") if "cache" not in p.relative_to(place).parts[:1]}


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.ci)])
def test_import_and_merge_of_damaged_exports(place, count):
    maker = Mutator(targets.exports() + targets.seeds()[:3], Random(f"import {count}"))
    before, codes = outside(place), []
    for _ in range(count):
        (place / "out" / "in.json").write_bytes(maker.make())
        codes.append(run(place, "import", str(place / "out" / "in.json"), "--yes"))
        if len(codes) % 8 == 0:
            run(place, "merge", str(place / "out" / "in.json"), "-o", str(place / "out" / "merged.json"), "--force")
            run(place, "list")
    assert {3} <= set(codes) <= {0, 2, 3}
    assert count < 100 or 0 in codes
    after = outside(place)
    assert {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {
        str(place / "out"), str(place / "out" / "in.json"), str(place / "out" / "merged.json"),
    }  # fmt: skip
    TableStore(place / "cache").load(targets.DEVICE, targets.OP)


def test_what_import_writes_is_for_its_user_alone(place, tmp_path):
    (tmp_path / "out").mkdir()
    old = os.umask(0)
    try:
        assert run(tmp_path, "import", str(place / "good.json"), "--yes") == 0
        assert run(tmp_path, "export", str(tmp_path / "out" / "x.json")) == 0
    finally:
        os.umask(old)
    found = {p.relative_to(tmp_path): stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "cache").rglob("*")}
    assert Path("cache/v1/cuda/sm_90/h200-132/rms_norm.json") in found
    for path, mode in found.items():
        assert mode == (0o700 if (tmp_path / path).is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "out" / "x.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("verb", ["import", "merge"])
def test_no_link_leads_out(place, tmp_path, verb, depth):
    """A link in the place of a directory, of the table, or of its lock."""
    (tmp_path / "out").mkdir(exist_ok=True)
    secret = tmp_path / "outside"
    root = tmp_path / ("cache" if verb == "import" else "out")
    parts = ["v1", "cuda", "sm_90", "h200-132", "rms_norm.json", "rms_norm.json.lock"]
    parts = parts[:depth] if depth < 6 else [*parts[:4], parts[5]]
    link = root.joinpath(*parts)
    link.parent.mkdir(parents=True, exist_ok=True)
    if depth < 5:
        secret.mkdir()
        (secret / "kept").write_text("kept")
    else:
        secret.write_text("kept")
    link.symlink_to(secret)
    arguments = ("import", "--yes") if verb == "import" else ("merge", "-o", str(root))
    code = run(tmp_path, arguments[0], str(place / "good.json"), *arguments[1:])
    kept = secret / "kept" if depth < 5 else secret
    assert kept.read_text() == "kept"
    assert [p.name for p in secret.iterdir()] == ["kept"] if depth < 5 else True
    # import sets a table aside that is a link, and merge takes no lock; all else is refused.
    assert code == (0 if (verb, depth) in (("import", 5), ("merge", 6)) else 3)


@pytest.mark.parametrize(
    "name", ["../../../../tmp/x", "..", "/etc", "a/b", "a\\..\\b", ".hidden", "", "\u002e\u002e/x"]
)
def test_no_name_leads_out(place, tmp_path, name):
    for change in ({"op": name}, {"directory": f"cuda/sm_90/{name}"}, {"directory": f"{name}/sm_90/h200-132"}):
        document = {**json.loads(render(targets.table(targets.stored()), seal=False)), **change}
        (tmp_path / "in.json").write_text(json.dumps({"export": 1, "tables": [document]}))
        assert run(tmp_path, "import", str(tmp_path / "in.json"), "--yes") == 3
    assert not list(tmp_path.rglob("*rms_norm*"))
