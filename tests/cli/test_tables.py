"""list, export, import, merge and prune on real tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def table_of(cache: Path) -> Path:
    return next(cache.glob("v1/*/*/*/rms_norm.json"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    document.pop("digest", None)  # as somebody does who edits a table by hand
    change(document)
    path.write_text(json.dumps(document))


def dated(date: str, **changes: object) -> Callable[[dict[str, Any]], None]:
    """An edit that gives every decision and sample a date, and the first decision other fields."""

    def change(document: dict[str, Any]) -> None:
        for entry in (*document["decisions"], *document["samples"]):
            entry["provenance"]["date"] = date
        document["decisions"][0].update(changes)

    return change


def test_list(warmed: Path, tune_json: Callable[..., Any]) -> None:
    rows = tune_json("list", "--store", "user")
    assert len(rows) == 6
    for row in rows:
        assert (row["op"], row["store"], row["root"], row["stale"]) == ("rms_norm", "user", str(warmed), "")
        assert row["gain"] == pytest.approx(row["default_us"] / row["time_us"])


def test_list_says_what_is_stale(warmed: Path, tune: Callable[..., Any]) -> None:
    edit(table_of(warmed), lambda d: d["decisions"][0]["provenance"].update(source="0" * 12))
    assert tune("list").stdout.count("user (stale)") == 1


def test_list_filters(warmed: Path, tune_json: Callable[..., Any]) -> None:
    for arguments, count in {
        ("--op", "rms_norm"): 6,
        ("--device", "cpu"): 6,
        ("--device", "h100"): 0,
        ("--store", "shipped"): 0,
        ("--store", "user,shipped", "--device", "cpu,cuda"): 6,
    }.items():
        assert len([row for row in tune_json("list", *arguments) if row["device"].startswith("cpu")]) == count


def test_list_reads_the_search_path(
    warmed: Path,
    tmp_path: Path,
    tune: Callable[..., Any],
    tune_json: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = tmp_path / "cluster"
    cluster.mkdir(mode=0o755)
    tune("export", cluster)
    monkeypatch.setenv("LIGER_TUNE_TABLES", str(cluster))
    assert {row["store"] for row in tune_json("list", "--device", "cpu")} == {"user", "cluster"}


def test_list_of_nothing(tune: Callable[..., Any]) -> None:
    assert "no table holds a decision" in tune("list", "--store", "user").stdout
    tune("list", "--store", "nope", code=2)
    tune("list", "--op", "nope", code=2)


def test_export_and_import_are_lossless(
    warmed: Path, tmp_path: Path, tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "tables.json", tmp_path / "other-cache"
    tune("export", file)
    monkeypatch.setenv("LIGER_TUNE_CACHE_DIR", str(other))
    shown = tune("import", file, code=1)
    assert "run it again with --yes" in shown.stdout
    assert shown.stdout.count(": + rms_norm/default/") == 6
    assert not list(other.glob("v1"))
    tune("import", file, "--yes")
    assert table_of(other).read_bytes() == table_of(warmed).read_bytes()
    assert "no changes" in tune("import", file).stdout


def test_export_refuses_to_replace_and_to_export_nothing(
    warmed: Path, tmp_path: Path, tune: Callable[..., Any]
) -> None:
    file = tmp_path / "tables.json"
    file.write_text("mine")
    tune("export", file, code=3)
    assert file.read_text() == "mine"
    tune("export", file, "--force")
    assert json.loads(file.read_text())["tables"]
    tune("export", tmp_path / "none.json", "--device", "h100", code=3)
    tune("export", tmp_path / "no" / "such" / "directory.json", code=3)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_export_of_decisions_alone(warmed: Path, tmp_path: Path, tune_json: Callable[..., Any]) -> None:
    assert tune_json("export", tmp_path / "t.json", "--decisions-only")["decisions"] == 6
    (table,) = json.loads((tmp_path / "t.json").read_text())["tables"]
    assert (len(table["decisions"]), table["samples"]) == (6, [])


@pytest.mark.parametrize(("theirs", "expected"), [("2001-01-01", 7.0), ("2999-01-01", 5.0)])
def test_of_two_entries_the_newer_counts(
    warmed: Path, tmp_path: Path, tune: Callable[..., Any], tune_json: Callable[..., Any], theirs: str, expected: float
) -> None:
    file = tmp_path / "theirs.json"
    tune("export", file)
    edit(file, lambda d: dated(f"{theirs}T00:00:00+00:00", time_us=5.0)(d["tables"][0]))
    edit(table_of(warmed), dated("2020-01-01T00:00:00+00:00", time_us=7.0))
    tune("import", file, "--yes")
    assert min(row["time_us"] for row in tune_json("list")) <= expected
    first = json.loads(table_of(warmed).read_text())["decisions"][0]
    assert first["time_us"] == expected
    tune("import", file, "--yes", "--replace")
    assert json.loads(table_of(warmed).read_text())["decisions"][0]["time_us"] == 5.0


def test_import_notes_what_cannot_be_used_here(warmed: Path, tmp_path: Path, tune_json: Callable[..., Any]) -> None:
    table = tmp_path / "rms_norm.json"
    table.write_bytes(table_of(warmed).read_bytes())
    edit(table, dated("2999-01-01", implementation="cpu:of_tomorrow"))
    report = tune_json("import", table, "--yes")
    assert report["written"]
    assert any("cpu:of_tomorrow" in note for note in report["notes"])


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema=2),
        lambda d: d.update(op="../../etc/passwd"),
        lambda d: d.update(directory="../../..", decisions=[], samples=[]),
        lambda d: d.update(directory="cuda/sm_90/h200-132"),
        lambda d: d.update(device={}),
        lambda d: d["decisions"][0].update(time_us=-1),
        lambda d: d["decisions"][0].update(implementation=["x"]),
        lambda d: d["samples"][0].update(status="excellent"),
        lambda d: d["decisions"][0]["dims"].update(rows=0),
    ],
)
def test_import_refuses_what_does_not_validate(
    warmed: Path, tmp_path: Path, tune: Callable[..., Any], change: Callable[[dict[str, Any]], object]
) -> None:
    before = {path: path.read_bytes() for path in warmed.rglob("*.json")}
    file = tmp_path / "theirs.json"
    tune("export", file)
    edit(file, lambda d: change(d["tables"][0]))
    result = tune("import", file, "--yes", code=3)
    assert result.stderr.startswith("error: ")
    assert {path: path.read_bytes() for path in warmed.rglob("*.json")} == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"export": 2, "tables": []}', '{"export": 1, "tables": [1]}', "[" * 99999, "\x00"],
)
def test_import_of_what_is_no_table(tmp_path: Path, tune: Callable[..., Any], content: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    tune("import", file, "--yes", code=3)


def test_import_writes_nowhere_else(warmed: Path, tmp_path: Path, tune: Callable[..., Any]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    file = tmp_path / "t.json"
    tune("export", file)
    directory = table_of(warmed).parent
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    directory.symlink_to(outside)
    assert "leads out of" in tune("import", file, "--yes", code=3).stderr
    assert not list(outside.iterdir())


def test_import_of_a_missing_file_and_an_empty_directory(tmp_path: Path, tune: Callable[..., Any]) -> None:
    tune("import", tmp_path / "none.json", code=3)
    tune("import", tmp_path, code=3)


def test_merge_of_files_and_directories(warmed: Path, tmp_path: Path, tune: Callable[..., Any]) -> None:
    old, new, out = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "out.json"
    tune("export", old)
    new.write_bytes(old.read_bytes())
    edit(old, lambda d: dated("2020-01-01", time_us=7.0)(d["tables"][0]))
    edit(new, lambda d: dated("2021-01-01", time_us=5.0)(d["tables"][0]))
    for sources in ((old, new), (new, old)):
        assert "1 table, 6 decisions from 2 sources" in tune("merge", *sources, "-o", out, "--force").stdout
        assert json.loads(out.read_text())["tables"][0]["decisions"][0]["time_us"] == 5.0
    tune("merge", old, new, "-o", out, code=3)
    directory = tmp_path / "shipped"
    directory.mkdir()
    tune("merge", old, "-o", directory)
    tune("merge", new, "-o", directory)
    tune("merge", old, "-o", directory)
    assert json.loads(table_of(directory).read_text())["decisions"][0]["time_us"] == 5.0


def test_merge_needs_an_output(tmp_path: Path, tune: Callable[..., Any]) -> None:
    tune("merge", tmp_path, code=2)


def test_prune_removes_what_nothing_can_use(
    warmed: Path, tune: Callable[..., Any], tune_json: Callable[..., Any]
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["decisions"][0]["implementation"] = "cpu:gone"
        document["samples"][0]["config"] = {"no_such_parameter": 1}

    edit(table_of(warmed), change)
    kept = table_of(warmed).read_bytes()
    would = tune_json("prune", "--dry-run")["would_remove"]
    assert sum(row["decisions"] for row in would) == sum(row["samples"] for row in would) == 1
    assert table_of(warmed).read_bytes() == kept
    assert "2 entries removed" in tune("prune").stdout
    assert len(json.loads(table_of(warmed).read_text())["decisions"]) == 5
    assert "0 entries removed" in tune("prune").stdout


def test_prune_of_the_stale_and_the_old(warmed: Path, tune: Callable[..., Any], tune_json: Callable[..., Any]) -> None:
    edit(table_of(warmed), lambda d: d["decisions"][0]["provenance"].update(source="0" * 12))
    edit(table_of(warmed), lambda d: d["decisions"][1]["provenance"].update(date="2020-01-01T00:00:00+00:00"))
    assert tune_json("prune", "--dry-run")["would_remove"] == []
    (row,) = tune_json("prune", "--dry-run", "--stale")["would_remove"]
    assert (row["decisions"], row["samples"]) == (1, 0)
    (row,) = tune_json("prune", "--dry-run", "--older-than", "2021-01-01")["would_remove"]
    assert (row["decisions"], row["reason"]) == (1, "measured 2020-01-01")
    assert "2 entries removed" in tune("prune", "--stale", "--older-than", "90d").stdout
    assert "0 entries removed" in tune("prune", "--op", "rms_norm", "--device", "h100", "--older-than", "0d").stdout
    tune("prune", "--older-than", "0d")
    assert not list(warmed.glob("v1/*/*/*/rms_norm.json"))
    tune("prune", "--older-than", "soon", code=2)


def test_prune_keeps_what_belongs_to_a_plugin_that_is_only_not_loaded_now(warmed: Path) -> None:
    from liger_registry.cli import _prune
    from liger_registry.plugins import PluginRecord
    from liger_registry.runtime import Registry
    from liger_registry.table import Stored

    registry = Registry()
    directory = registry.user_store.devices()[0]
    table = registry.user_store.load(directory, "rms_norm")
    stored = next(iter(table.decisions.values()))

    def of(implementation: str, package: str) -> Stored:
        from dataclasses import replace

        choice = replace(stored.choice, implementation=implementation)
        return replace(stored, choice=choice, provenance=replace(stored.provenance, package=package))

    plugin = PluginRecord("p", "liger_registry.kernels", "their-kernels", "1.0", "m:f", "failed", "ImportError")
    reason = _prune.unknown(registry.catalog, (plugin,))
    assert reason(of("cuda:theirs", "their-kernels 1.0")) == ""
    assert reason(of("cuda:theirs", "")) == ""
    assert "cuda:ours_of_old" in reason(of("cuda:ours_of_old", "liger-registry 0.0.1"))
    assert reason(stored) == ""


def test_a_device_that_no_table_and_nobody_knows(warmed: Path, tmp_path: Path, tune: Callable[..., Any]) -> None:
    from liger_registry.cli import _archive
    from liger_registry.runtime import Registry
    from liger_registry.table import Table

    for arguments in (("export", tmp_path / "out.json"), ("prune",), ("list",)):
        result = tune(*arguments, "--device", "h999", code=2)
        assert "h999" in result.stderr
        assert "  fix: " in result.stderr
    # Known by a table, by its name or by another name of it.
    unit = Registry().user_store.devices()[0][2]
    for name in (unit, unit.rpartition("-")[0], "cpu", "cuda", "sm_90", "h100", "sm_90-78u-64g"):
        tune("prune", "--dry-run", "--device", name)
    tables = [Table(("cuda", "sm_90", "h100-sxm-132"), "rms_norm"), Table(("cuda", "sm_90", "odd-7"), "rms_norm")]
    assert _archive.selected(tables, (), ("h100",)) == tables[:1]
    assert _archive.selected(tables, (), ("odd",)) == tables[1:]
    assert _archive.selected(tables, (), ("sm_90",)) == tables


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (("import", "FILE"), "{"),
        (("import", "FILE"), "{}"),
        (("import", "FILE"), '{"export": 7}'),
        (("import", "FILE"), '{"export": 1, "tables": [3]}'),
        (("import", "FILE"), None),
        (("merge", "FILE", "-o", "/proc/x.json"), "{}"),
        (("export", "/proc/x.json"), ""),
        (("warmup", "FILE", "--device", "cpu"), "[]"),
        (("warmup", "FILE", "--device", "cpu"), '{"model_type": "unheard-of"}'),
        (("list", "--store", "bogus"), ""),
        (("prune", "--older-than", "soon"), ""),
        (("verify", "--implementation", "nope", "--device", "cpu"), ""),
        (("explain", "rms_norm", "--rows", "8", "--hidden", "8", "--phase", "sideways"), ""),
        (("explain", "rms_norm", "--rows", "8", "--hidden", "8", "--needs", "q"), ""),
        (("explain", "rms_norm", "--rows", "8", "--hidden", "8", "--dtype", "y="), ""),
        (("explain", "rms_norm", "--rows", "8", "--hidden", "8", "--flag", "nope=1"), ""),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else None,
)
def test_every_error_says_the_way_out(
    warmed: Path, tmp_path: Path, tune: Callable[..., Any], arguments: tuple[str, ...], content: str | None
) -> None:
    file = tmp_path / "foo.json"
    if content is not None:
        file.write_text(content)
    result = tune(*(str(file) if part == "FILE" else part for part in arguments), code=None)
    assert result.exit_code in (2, 3)
    assert "\n  fix: " in result.stderr
    if "FILE" in arguments:
        assert "foo.json" in result.stderr
