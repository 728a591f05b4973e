"""The README and the pages below docs/: their code runs, and what they claim of commands and variables is so."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from liger_registry.settings import Settings

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
# Written by programs that have tests of their own, or by tests.
WRITTEN = re.compile(r"(models.*|reliability)\.md")
PAGES = sorted(path for path in DOCS.rglob("*.md") if not WRITTEN.fullmatch(path.name))
# What is in blocks: run as a test, or text that none could run here.
LANGUAGES = {"python", "console", "text", "dockerfile", "toml"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in BLOCK.finditer(text)]


@dataclass(frozen=True)
class Command:
    """A command of a console block, the exit code it must have, and the output it is shown with."""

    text: str
    code: int
    output: tuple[str, ...]


def commands(block: Block) -> Iterator[Command]:
    """The commands behind ``$``, each with the lines below it; ``# exit code 3`` behind one says how it ends."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with a command"
    for part in parts[1:]:
        first, *output = part.rstrip("\n").split("\n")
        text, _, code = first.partition(" # exit code ")
        yield Command(text.strip(), int(code or 0), tuple(output))


def shown(command: Command, output: str) -> str:
    """What a page shows and the output does not have in that order; ``...`` stands for anything."""
    place = 0
    for line in command.output:
        for piece in filter(None, (piece.strip() for piece in line.split("..."))):
            found = output.find(piece, place)
            if found < 0:
                return piece
            place = found + len(piece)
    return ""


def run_command(command: Command, directory: Path) -> None:
    words = shlex.split(command.text)
    settings = {}
    while "=" in words[0]:
        name, _, settings[name] = words.pop(0).partition("=")
    # Importing torch takes longer than most verbs; one that starts workers, or becomes another program, gets a process
    # of its own all the same.
    own = words[1:2] in (["warmup"], ["exec"]) or set("|&;<>*") & set(command.text)
    quick = words[0] == "liger-tune" and not own
    code, output = (run_here if quick else run_shell)(command.text, words, settings, directory)
    assert code == command.code, f"$ {command.text}\n{output}"
    assert not (missing := shown(command, output)), f"$ {command.text}\nno {missing!r} in\n{output}"


def run_here(text: str, words: list[str], settings: dict[str, str], directory: Path) -> tuple[int, str]:
    """A verb in this process, over a registry of its own, as each process has."""
    from typer.testing import CliRunner

    from liger_registry import runtime
    from liger_registry.cli import app

    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setattr(runtime, "registry", runtime.Registry())
        result = CliRunner().invoke(app, words[1:])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_shell(text: str, words: list[str], settings: dict[str, str], directory: Path) -> tuple[int, str]:
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "TMPDIR": str(directory),  # where tuners of one machine wait for each other
    }
    done = subprocess.run(text, shell=True, cwd=directory, env=environ, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def run_page(path: Path, directory: Path) -> None:
    """The blocks of a page in order: Python in one namespace, commands in one directory."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(path):
        if block.language == "python":
            # So that a failure names the page's own line.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            exec(code, namespace)
        elif block.language == "console":
            for command in commands(block):
                run_command(command, directory)


def tiered(source: str) -> Any:
    """A block of the README; one that imports transformers or runs a head belongs to the second tier."""
    return pytest.param(source, marks=[pytest.mark.ci] if "transformers" in source else [])


@pytest.mark.parametrize("source", [tiered(b.text) for b in blocks(README) if b.language == "python"])
def test_python_blocks_run(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, str(README), "exec"), {})
    assert ".explain(" not in source or "tiers" in capsys.readouterr().out


# What a newcomer does before the first command, in an environment and a checkout of his own.
INSTALLING = ("git", "python3", "pip")


@pytest.mark.ci
def test_the_first_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's commands in order; the whole of it, installation included, is tried by hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    console = [command for b in blocks(README) if b.language == "console" for command in commands(b)]
    run = [command for command in console if not command.text.startswith(INSTALLING)]
    assert len(run) >= 8
    for command in run:
        run_command(command, tmp_path)
    losses = [command for command in run if "plain_pytorch" in command.text]
    assert len(losses) == 2
    outputs = [run_shell(c.text, [], {}, tmp_path)[1].splitlines()[-1] for c in losses]
    assert outputs[0] == outputs[1], "the losses with and without the kernels"


@pytest.mark.ci
@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if {b.language for b in blocks(path)} & {"python", "console"}],
    ids=lambda path: path.relative_to(DOCS).as_posix(),
)
def test_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_page(path, tmp_path)


def test_what_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)
    for text in ("$ exit 3\n", "$ echo one\ntwo\n", "$ echo b a\na ... b\n", "$ true # exit code 1\n"):
        page.write_text(f"```console\n{text}```\n")
        with pytest.raises(AssertionError):
            run_page(page, tmp_path)
    page.write_text("```console\n$ echo one two three\none ... three\n$ exit 3 # exit code 3\n```\n")
    run_page(page, tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_page_is_well_formed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {block.language for block in blocks(path)} <= LANGUAGES, "a language that no test runs"
    assert text.count("```") == 2 * len(blocks(path))
    assert re.search(r"^# \S", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+\.md)", text):
        assert (path.parent / target).resolve().is_file(), target


def test_every_verb_has_a_row_in_the_readme() -> None:
    from typer.main import get_command

    from liger_registry.cli import app

    verbs: set[str] = set(get_command(app).commands)  # type: ignore[attr-defined]
    first = (line.split("|")[1] for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `"))
    assert verbs <= {verb for cell in first for verb in re.findall(r"`([a-z-]+)`", cell)}


def variables(path: Path) -> list[str]:
    return re.findall(r"^\| `(LIGER_[A-Z_]+)`", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", [README, DOCS / "reference" / "environment.md"], ids=lambda path: path.name)
def test_every_environment_variable_is_one_that_is_read(path: Path) -> None:
    source = (ROOT / Settings.__module__.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert sorted(variables(path)) == sorted(set(re.findall(r'"(LIGER_[A-Z_]+)"', source)))


def test_every_mode_is_told() -> None:
    from liger_registry.settings import MODES

    row = next(x for x in (DOCS / "reference/environment.md").read_text().splitlines() if "`LIGER_TUNE_MODE`" in x)
    assert set(MODES) <= set(re.findall(r"`([a-z]+)`", row))


def test_every_verb_that_is_named_is_one() -> None:
    from typer.main import get_command

    from liger_registry.cli import app

    verbs: set[str] = set(get_command(app).commands)  # type: ignore[attr-defined]
    for path in (README, *PAGES):
        named = set(re.findall(r"liger-tune ([a-z][a-z-]+)", path.read_text(encoding="utf-8")))
        assert named <= verbs, path


def test_every_source_of_an_answer_is_explained() -> None:
    from liger_registry.decision import TIERS

    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    place = 0
    for tier in TIERS:  # in the order in which they are asked
        place = text.index(f"`{tier}`", place)
    table = (DOCS / "howto/debug.md").read_text(encoding="utf-8")
    assert all(f"`{tier}`" in table for tier in TIERS)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_commands_are_what_the_commands_say() -> None:
    made = generator().pages()
    there = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.glob("commands/*.md")}
    assert there.keys() == made.keys(), "run python docs/generate.py"
    for name, text in made.items():
        assert there[name] == text, f"{name} is stale: run python docs/generate.py"


def test_a_page_of_a_command_has_every_option() -> None:
    from typer.main import get_command

    from liger_registry.cli import app

    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        text = (DOCS / "commands" / f"{name}.md").read_text(encoding="utf-8")
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert all(f"`{option}`" in text for option in parameter.opts)


@pytest.mark.ci
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="no site is built: mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    for path in PAGES:
        name = path.relative_to(DOCS).with_suffix("")
        made = site / (name if name.name != "index" else name.parent) / "index.html"
        assert made.is_file(), made
    api = (site / "reference/api/index.html").read_text(encoding="utf-8")
    assert 'id="liger_registry.runtime.Registry.get"' in api
    assert 'id="liger_registry.testing.conformance_cases"' in api
    assert 'id="liger_registry.errors.ExtraMissingError"' in api
    loaded = [
        address
        for page in site.rglob("*.html")
        for address in re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
    ]
    assert [address for address in loaded if "canonical" not in address] == []
