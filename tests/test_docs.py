"""The README's Python and its claims that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from liger_registry.settings import Settings

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("source", blocks("python"))
def test_python_blocks_run(source, capsys):
    exec(compile(source, str(README), "exec"), {})
    assert ".explain(" not in source or "tiers" in capsys.readouterr().out


def test_every_environment_variable_is_one_that_is_read():
    named = set(re.findall(r"^\| `(LIGER_[A-Z_]+)`", README.read_text(), re.MULTILINE))
    source = (Path(Settings.__module__.replace(".", "/")).with_suffix(".py"),)
    text = (README.parent / source[0]).read_text()
    assert named == set(re.findall(r'"(LIGER_[A-Z_]+)"', text))


def test_every_verb_of_the_readme_is_one():
    from typer.main import get_command

    from liger_registry.cli import app

    verbs = set(get_command(app).commands)
    named = set(re.findall(r"liger-tune ([a-z-]+)", README.read_text()))
    assert named <= verbs
