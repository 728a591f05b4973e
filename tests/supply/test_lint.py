"""Nothing of this distribution unpickles, evaluates or runs data: a look at the syntax of all of its source.

The few places that come near it stand in a list, each with its reason; one that goes must leave the list too.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("liger_registry", "backends/cuda", "backends/rocm", "tuning_cache")
# Modules whose use means that data becomes code.
MODULES = {
    "_pickle", "cloudpickle", "code", "codeop", "commands", "copyreg", "cPickle", "dill", "joblib", "jsonpickle",
    "marshal", "pickle", "pickletools", "runpy", "shelve", "xmlrpc", "yaml",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
# By the end of a dotted name: what it does with what it is given.
SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
MAKERS = ("CodeType", "FunctionType", "load_inline", "cpp_extension.load")
PICKLERS = (
    "pickle.load", "pickle.loads", "Unpickler", "recv", "ProcessPoolExecutor", "Pool", "Queue", "gather_object",
    "all_gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list",
)  # fmt: skip
CALLS = {
    **dict.fromkeys(SHELLS, "runs a shell"),
    **dict.fromkeys(MAKERS, "makes code"),
    **dict.fromkeys(PICKLERS, "unpickles"),
}
RANKS = "torch.distributed's own exchange of objects between the ranks of one job, which trust each other with memory"
PROCESSES = "a pool of processes that this one started, and nobody else writes to"
GENERATED = "text made here of the names that a registered operation or kernel declares, checked to be identifiers"
# What reads tables, plans and names; it imports no module by a name that it read either.
READERS = (
    "config",
    "device",
    "digest",
    "document",
    "json_text",
    "misses",
    "plan",
    "problem",
    "store",
    "table",
    "trust",
)
ALLOWED = {
    ("liger_registry/transformers/engine/rebuild.py", "compile"): (
        "the forward of a model's own class, whose source Python has loaded already, is compiled again with calls of "
        "this package in place of expressions; no text comes from a table, a file or a model's weights"
    ),
    ("liger_registry/transformers/engine/rebuild.py", "FunctionType"): "the function that holds that code",
    ("liger_registry/transformers/trl.py", "FunctionType"): (
        "TRL's own function, whose code Python has loaded already, once more under the name that it was defined with"
    ),
    ("liger_registry/transformers/callback.py", "all_gather_object"): RANKS,
    ("liger_registry/calls.py", "exec"): GENERATED,
    ("liger_registry/calls.py", "compile"): GENERATED,
    ("liger_registry/launch.py", "exec"): GENERATED,
    ("liger_registry/launch.py", "compile"): GENERATED,
    ("liger_registry/compile_pool.py", "recv"): PROCESSES,
    ("liger_registry/plan.py", "pickle"): "dumps alone, to find out early what cannot be sent to the other ranks",
    ("liger_registry/plan.py", "all_gather_object"): RANKS,
    ("liger_registry/tuning/distributed.py", "all_gather_object"): RANKS,
    ("liger_registry/cli/warmup.py", "all_gather_object"): RANKS,
}


def found(source: str) -> Iterator[tuple[str, str]]:
    """What a source does that it should not: the name, and what is wrong with it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((a.name, "is no module for data") for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if not node.level and (node.module or "").split(".")[0] in MODULES:
                yield str(node.module), "is no module for data"
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[tuple[str, str]]:
    name = ast.unparse(node.func)
    keywords = {k.arg: k.value for k in node.keywords}
    if isinstance(node.func, ast.Name) and name in BUILTINS:
        yield name, "runs text"
    for end, why in CALLS.items():
        if name == end or name.endswith(f".{end}"):
            yield end, why
            break
    if name.endswith("torch.load") and not _is(keywords.get("weights_only"), True):
        yield "torch.load", "unpickles without weights_only=True"
    if name.split(".")[-1] == "load" and _is(keywords.get("allow_pickle"), True):
        yield "load", "unpickles"
    if "shell" in keywords and not _is(keywords["shell"], False):
        yield name, "runs a shell"


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def sources() -> list[Path]:
    """Every file of Python that the wheel holds."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_nothing_is_unpickled_or_evaluated():
    seen = {}
    for path in sources():
        seen.update({(path.relative_to(ROOT).as_posix(), name): why for name, why in found(path.read_text())})
    assert {key: why for key, why in seen.items() if key not in ALLOWED} == {}
    assert sorted(ALLOWED.keys() - seen.keys()) == []
    assert len(sources()) > 150


@pytest.mark.parametrize("name", READERS)
def test_readers_import_nothing_by_name(name):
    text = (ROOT / "liger_registry" / f"{name}.py").read_text()
    assert "importlib" not in text
    assert "getattr(sys.modules" not in text


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "from yaml import load",
        "import yaml.constructor",
        "def f(x):\n    return eval(x)",
        "exec('x = 1')",
        "compile(text, 'x', 'exec')",
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)",
        "os.system('ls')",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=flag)",
        "pipe.recv()",
        "pickle.loads(data)",
        "types.FunctionType(code, {})",
        "dist.all_gather_object(a, b)",
    ],
)
def test_the_lint_sees(source):
    assert list(found(textwrap.dedent(source)))


@pytest.mark.parametrize(
    "source",
    [
        "re.compile('x')",
        "torch.compile(f)",
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "pipe.recv_bytes()",
        "subprocess.run(['ls'])",
        "from liger_registry.compile import compile_one",
        "ast.literal_eval(x)",
        "self.compile(problem)",
    ],
)
def test_the_lint_lets_pass(source):
    assert not list(found(source))
