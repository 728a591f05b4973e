"""Directories that are only to be read are refused where others could have written what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from liger_registry.errors import TableError
from liger_registry.trust import refuse_untrusted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="permissions, owners and links of POSIX")
OTHER = 54321


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """What is above the root, the root, a directory in it and a file in that, of which the last two count as inner."""
    above, root = tmp_path / "above", tmp_path / "above" / "root"
    file = root / "inner" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("")
    found = [above, root, file.parent, file]
    for place in found:
        place.chmod(0o755 if place.is_dir() else 0o644)
    return found


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch):
    """Gives places to other users, as far as ``os.stat`` tells."""
    owners: dict[str, int] = {}
    real = os.stat

    def stat(place, *rest, **kwargs):
        status = real(place, *rest, **kwargs)
        if (owner := owners.get(os.path.realpath(place))) is None:
            return status
        return os.stat_result([owner if n == 4 else value for n, value in enumerate(status)])

    monkeypatch.setattr(os, "stat", stat)
    return owners


def refused(root: Path, file: Path) -> TableError:
    with pytest.raises(TableError) as caught:
        refuse_untrusted(root, file)
    return caught.value


def test_what_is_ones_own(places: list[Path]):
    _, root, _, file = places
    refuse_untrusted(root, file)


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_others_can_write_to(places: list[Path], depth: int, mode: int):
    place = places[depth]
    place.chmod(place.stat().st_mode | mode)
    error = refused(places[1], places[3])
    assert (error.what, error.filename) == (f"others can write to {place}", str(place))
    # The sticky bit keeps nobody from adding a file.
    place.chmod(place.stat().st_mode | 0o1000)
    assert refused(places[1], places[3]).filename == str(place)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_belongs_to_another_user(
    places: list[Path], depth: int, owned: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    owned.update({str(place): 1000 for place in places})
    refuse_untrusted(places[1], places[3])
    owned[str(places[depth])] = 0
    refuse_untrusted(places[1], places[3])
    owned[str(places[depth])] = OTHER
    error = refused(places[1], places[3])
    assert error.filename == str(places[depth])
    assert str(OTHER) in error.what


def test_what_is_above_the_root(places: list[Path], owned: dict[str, int]):
    above, root, _, file = places
    owned[str(above)] = OTHER  # who may, for one, be the cluster's administrator
    refuse_untrusted(root, file)
    above.chmod(0o775)
    refuse_untrusted(root, file)
    above.chmod(0o777)
    error = refused(root, file)
    assert error.filename == str(above)
    assert f"chmod o-w {above}" in error.fix
    above.chmod(0o1777)
    refuse_untrusted(root, file)


def test_what_is_above_the_place_a_link_leads_to(places: list[Path], tmp_path: Path):
    above, root, _, _ = places
    link = tmp_path / "link"
    link.symlink_to(root)
    refuse_untrusted(link, link / "inner" / "file")
    above.chmod(0o777)
    assert refused(link, link / "inner" / "file").filename == str(above)


def test_what_is_above_a_link(places: list[Path], tmp_path: Path):
    _, root, _, _ = places
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.joinpath("link").symlink_to(root)
    shared.chmod(0o777)
    assert refused(shared / "link", shared / "link" / "inner" / "file").filename == str(shared)
    shared.chmod(0o1777)
    refuse_untrusted(shared / "link", shared / "link" / "inner" / "file")


def test_what_a_link_within_the_root_leads_through(places: list[Path]):
    _, root, inner, _ = places
    hidden = root / "hidden"
    hidden.mkdir(mode=0o755)
    inner.rename(hidden / "inner")
    inner.symlink_to(hidden / "inner")
    refuse_untrusted(root, inner / "file")
    hidden.chmod(0o777)
    assert refused(root, inner / "file").filename == str(hidden)


def test_a_relative_root(places: list[Path], monkeypatch: pytest.MonkeyPatch):
    above, _, _, _ = places
    monkeypatch.chdir(above)
    refuse_untrusted(Path("root"), Path("root/inner/file"))
    above.chmod(0o777)
    assert refused(Path("root"), Path("root/inner/file")).filename == str(above)
