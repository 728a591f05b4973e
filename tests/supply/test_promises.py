"""Each promise of SECURITY.md names tests, and each of these exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
ROWS = [row for row in re.findall(r"^\| (.+) \|$", TEXT, re.MULTILINE) if not row.startswith("promise")]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


def test_every_promise_names_a_test():
    assert len(ROWS) > 20
    assert [row for row in ROWS if "`tests/" not in row.rpartition(" | ")[2]] == []
    assert len(NAMED) == len(set(re.findall(r"`tests/[^`]+`", TEXT)) - {"`tests/supply/test_promises.py`"})


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_it_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_what_it_says_of_digests(tmp_path):
    import hashlib

    import targets

    from liger_registry.digest import sealed

    assert "sed 2d rms_norm.json | sha256sum" in TEXT
    lines = sealed(targets.exports()[0].decode()).splitlines(keepends=True)
    assert hashlib.sha256("".join([lines[0], *lines[2:]]).encode()).hexdigest() in lines[1]
