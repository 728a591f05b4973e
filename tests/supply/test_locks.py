"""Locks in a directory that everybody can write to: somebody else's directory or link is not used."""

from __future__ import annotations

import os
import tempfile
import types

import pytest

from liger_registry.locking import locked, own_directory

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners of POSIX")


def test_a_directory_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = own_directory()
    assert place.parent == tmp_path
    assert place.stat().st_mode & 0o777 == 0o700
    real = os.lstat

    def foreign(path):
        found = real(path)
        return types.SimpleNamespace(st_mode=found.st_mode, st_uid=found.st_uid + 1)

    monkeypatch.setattr(os, "lstat", foreign)
    with pytest.raises(PermissionError, match="another user"):
        own_directory()
    monkeypatch.setattr(os, "lstat", real)
    place.rmdir()
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="or is a link"):
        own_directory()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "table.json.lock").symlink_to(tmp_path / "kept")
    with pytest.raises(OSError, match="a link lies where the lock should"), locked(tmp_path / "table.json", 1.0):
        pass
    assert (tmp_path / "kept").read_text() == "kept"
    (tmp_path / "table.json.lock").unlink()
    with locked(tmp_path / "table.json", 1.0):
        assert (tmp_path / "table.json.lock").exists()
