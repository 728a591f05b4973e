"""Scripts written for liger-kernel 0.8.5: unchanged under ``exec``, and with nothing but their imports changed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from under_exec import run

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def losses(*command: object, **options: bool) -> list[float]:
    return [float(line) for line in run(sys.executable, "-W", "error::UserWarning", *command, **options).split()]


def test_there_are_scripts():
    assert [path.stem for path in SCRIPTS] == ["dpo", "own_model", "sft"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem == "dpo" else pytest.mark.ci, id=path.stem)
        for path in SCRIPTS
    ],
)
def test_a_script(path, tmp_path):
    unchanged = losses(path)
    text = path.read_text()
    changed = tmp_path / path.name
    changed.write_text(re.sub(r"^(from|import) liger_kernel\b", r"\1 liger_registry", text, flags=re.MULTILINE))
    assert changed.read_text() != text
    assert losses(changed, execute=False) == unchanged
    plain = losses(path, "--plain")
    assert len(plain) == len(unchanged) >= 3
    assert len(set(plain)) >= 3  # it trains
    assert unchanged == pytest.approx(plain, rel=2e-5)
