"""Digests: every file that is written has one, reading holds the text against it, and its absence is labelled."""

from __future__ import annotations

import hashlib
import json
import warnings

import pytest
import targets
from typer.testing import CliRunner

from liger_registry.digest import checked, sealed
from liger_registry.document import parse, render
from liger_registry.errors import TableInvalidError
from liger_registry.store import TableStore, read_file

TABLE = targets.table(targets.stored(), targets.sample())
SEALED = render(TABLE).encode()


def digest_by_hand(text: bytes) -> str:
    """As anybody can compute it: SHA-256 of the file without its second line."""
    first, _, rest = text.split(b"\n", 2)
    return "sha256:" + hashlib.sha256(first + b"\n" + rest).hexdigest()


def test_every_table_and_export_carries_its_digest(tmp_path, monkeypatch):
    assert json.loads(SEALED)["digest"] == digest_by_hand(SEALED) == parse(SEALED).digest
    store = TableStore(tmp_path / "cache")
    store.record(targets.DEVICE, targets.OP, [targets.stored()])
    text = store.path(targets.DEVICE, targets.OP).read_bytes()
    assert json.loads(text)["digest"] == digest_by_hand(text)
    assert TableStore(tmp_path / "cache").load(targets.DEVICE, targets.OP).digest == digest_by_hand(text)
    assert run(tmp_path, monkeypatch, "export", tmp_path / "x.json")[0] == 0
    text = (tmp_path / "x.json").read_bytes()
    assert json.loads(text)["digest"] == digest_by_hand(text)


def run(root, monkeypatch, *arguments):
    from liger_registry import runtime
    from liger_registry.cli import app

    monkeypatch.setenv("LIGER_TUNE_CACHE_DIR", str(root / "cache"))
    monkeypatch.setattr(runtime, "registry", runtime.Registry())
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


CHANGES = {
    "a time": lambda t: t.replace(b"9.5", b"1.5", 1),
    "the winner": lambda t: t.replace(b"cuda:row", b"cuda:raw", 1),
    "an entry": lambda t: b"\n".join(line for line in t.split(b"\n") if b'"status"' not in line),
    "the digest": lambda t: t.replace(b"sha256:", b"sha256:0", 1)[: len(t)],
    "another digest": lambda t: t[:22] + b"0" * 64 + t[86:],
    "its kind": lambda t: t.replace(b"sha256:", b"sha512:", 1),
    "its place": lambda t: json.dumps(json.loads(t)).encode(),
    "white space": lambda t: t.replace(b": ", b":", 5),
    "more at the end": lambda t: t + b" ",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_on_import_and_a_miss_when_read(change, tmp_path, monkeypatch):
    damaged = CHANGES[change](SEALED)
    assert damaged != SEALED
    with pytest.raises(TableInvalidError):
        parse(damaged)
    path = TableStore(tmp_path / "cache").path(targets.DEVICE, targets.OP)
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not TableStore(tmp_path / "cache").load(targets.DEVICE, targets.OP)
    assert len(caught) == 1
    assert path.with_name(f"{path.name}.bad").read_bytes() == damaged
    (tmp_path / "in.json").write_bytes(damaged)
    code, output = run(tmp_path, monkeypatch, "import", tmp_path / "in.json", "--yes")
    assert code == 3
    assert not path.exists()
    export = CHANGES[change](targets.exports()[1])
    (tmp_path / "in.json").write_bytes(export)
    code, output = run(tmp_path, monkeypatch, "import", tmp_path / "in.json", "--yes")
    assert (code, "digest" in output or "JSON" in output) == (3, True) if export != targets.exports()[1] else (0, True)


def test_without_a_digest_it_is_read_as_before_and_labelled(tmp_path, monkeypatch):
    plain = render(TABLE, seal=False).encode()
    assert b"digest" not in plain
    assert parse(plain) == parse(SEALED)
    assert parse(plain).digest == ""
    assert read_file(targets.SHIPPED).skipped == ()
    for text, labelled in ((plain, True), (SEALED, False)):
        (tmp_path / "in.json").write_bytes(text)
        code, output = run(tmp_path, monkeypatch, "import", tmp_path / "in.json")
        assert code == 1
        assert ("note: no digest, so whether it was changed" in output) is labelled
    path = TableStore(tmp_path / "cache").path(targets.DEVICE, targets.OP)
    path.parent.mkdir(parents=True)
    path.write_bytes(plain)
    _, output = run(tmp_path, monkeypatch, "doctor")
    assert "without a digest, so whether they were changed cannot be told: rms_norm" in output


def test_the_label_goes_with_the_next_write(tmp_path):
    store = TableStore(tmp_path)
    path = store.path(targets.DEVICE, targets.OP)
    path.parent.mkdir(parents=True)
    path.write_text(render(TABLE, seal=False))
    assert store.load(targets.DEVICE, targets.OP).digest == ""
    store.record(targets.DEVICE, targets.OP, [targets.stored(2048)])
    assert TableStore(tmp_path).load(targets.DEVICE, targets.OP).digest
    assert TABLE.merged([targets.stored(4096)]).digest == ""


def test_line_ends_of_windows_are_no_change():
    assert parse(SEALED.replace(b"\n", b"\r\n")).digest == parse(SEALED).digest
    assert parse(SEALED.decode()).digest == parse(SEALED).digest


def test_a_document_of_any_text():
    text = '{\n"a": 1\n}\n'
    assert checked(sealed(text), json.loads(sealed(text))).startswith("sha256:")
    assert checked(text, json.loads(text)) == ""
    for value in (None, 1, "", [], "sha256:" + "0" * 64):
        document = {"digest": value, "a": 1}
        with pytest.raises(TableInvalidError, match="does not fit"):
            checked(json.dumps(document), document)
