"""Implementations: reasons for what they cannot do, and their launch functions, imported late."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap

import fakes
import pytest

from liger_registry import Capability, Config, ConfigSpace, Device
from liger_registry.config import Fields
from liger_registry.errors import PluginError, RegistrationError
from liger_registry.implementation import OWN_DISTRIBUTION, _import, source_hash
from liger_registry.problem import BACKWARD

PROBLEM = fakes.problem()
INTERPRETER, INTERPRETER_ROCM = Device.parse("interpreter"), Device.parse("interpreter:rocm")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A writer of modules that can be imported, and are forgotten again."""
    before = set(sys.modules)

    def write(**modules):
        for name, text in modules.items():
            path = tmp_path.joinpath(*name.split("__", 1)).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        source_hash.cache_clear()
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    source_hash.cache_clear()
    _import.cache_clear()


# --- capability -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "device", "reason"),
    [
        (Capability(), fakes.CPU, None),
        (Capability(), fakes.MI300X, None),
        (Capability("cuda"), fakes.H200, None),
        (Capability("cuda"), fakes.CPU, "it is for cuda, the device is cpu"),
        (Capability("cuda"), fakes.MI300X, "it is for cuda, the device is rocm"),
        (Capability("rocm"), fakes.H200, "it is for rocm, the device is cuda"),
        (Capability("cpu"), fakes.CPU, None),
        (Capability("cpu"), INTERPRETER, "it is for cpu, the device is interpreter"),
        (Capability("cuda", "sm_90"), INTERPRETER, None),
        (Capability("rocm"), INTERPRETER, "it is for rocm, the device is interpreter"),
        (Capability("rocm"), INTERPRETER_ROCM, None),
        (Capability("cuda", "sm_90"), fakes.H200, None),
        (Capability("cuda", "sm_90"), Device.parse("a100"), "it needs sm_90, the device is sm_80"),
        (Capability("cuda", "sm_90"), Device.parse("b200"), None),
        (Capability("rocm", "gfx942"), Device.parse("mi250x"), "it needs gfx942, the device is gfx90a"),
        (Capability(dtypes=("float32",)), fakes.CPU, "it does not take w in bfloat16"),
        (Capability(requires=("no_such_package",)), fakes.CPU, "the package no_such_package is not installed"),
        (
            Capability(requires=("no_such_package.part",)),
            fakes.CPU,
            "the package no_such_package.part is not installed",
        ),
        (Capability(requires=("json", "torch")), fakes.CPU, None),
    ],
    ids=str,
)
def test_capability(capability, device, reason):
    assert capability.why_not(PROBLEM, device) == reason


def test_an_absent_tensor_has_no_dtype_to_refuse():
    absent = fakes.Problem("affine", "default", "forward", PROBLEM.dims, Fields(x="float32", w="none"), Fields())
    assert Capability(dtypes=("float32",)).why_not(absent, fakes.CPU) is None


# --- legality ---------------------------------------------------------------------------------------------------------


def test_why_illegal_names_the_first_reason():
    tiled = fakes.tiled(deterministic=False)

    def why(config, problem=PROBLEM, device=fakes.H200, **terms):
        return tiled.why_illegal(config, problem, device, **terms)

    assert why(Config(block=64)) is None
    assert why(Config(block=64), deterministic=True).startswith("it is not deterministic")
    assert why(Config(block=64), device=fakes.CPU) == "it is for cuda, the device is cpu"
    assert why(Config(block=63)) == "block=63 is not declared"
    assert why(Config()) == "it has (), the space has (block)"
    assert why(Config(block=128), fakes.problem(hidden=64)) == "the block is wider than the row"
    assert why(Config(block=64), budget=6400) is None
    assert why(Config(block=64), budget=6399) == "it needs 6,400 bytes beyond the outputs, the budget is 6,399"


def test_threads_are_held_against_the_device():
    wide = fakes.implementation("wide", vendor="any", space=ConfigSpace(num_warps=[16, 32]))
    assert wide.why_illegal(Config(num_warps=32), PROBLEM, fakes.H200) is None
    assert wide.why_illegal(Config(num_warps=16), PROBLEM, fakes.MI300X) is None
    assert (
        wide.why_illegal(Config(num_warps=32), PROBLEM, fakes.MI300X)
        == "2048 threads a program, the device allows 1024"
    )


def planted(*arguments):
    raise ZeroDivisionError("planted\nin two lines")


def test_what_a_plugins_functions_raise_is_a_reason():
    plugin = fakes.tiled(heuristic=planted, space=fakes.SPACE.where(lambda c, p, d: c.block < 128 or planted(), "no"))
    text = "raised ZeroDivisionError: planted in two lines"
    assert plugin.propose(PROBLEM, fakes.H200) == f"its heuristic {text}"
    assert plugin.why_illegal(Config(block=64), PROBLEM, fakes.H200) is None
    assert plugin.why_illegal(Config(block=128), PROBLEM, fakes.H200) == f"its space {text}"
    # What raises is no reason to say that there is no such config.
    assert [c.block for c in plugin.configs(PROBLEM, fakes.H200)] == [32, 64, 128]
    hungry = fakes.tiled(extra_bytes=planted)
    assert hungry.why_illegal(Config(block=64), PROBLEM, fakes.H200) is None
    assert hungry.why_illegal(Config(block=64), PROBLEM, fakes.H200, budget=1) == f"its extra_bytes {text}"
    own = plugin.from_distribution(OWN_DISTRIBUTION)
    with pytest.raises(ZeroDivisionError):
        own.propose(PROBLEM, fakes.H200)
    with pytest.raises(ZeroDivisionError):
        own.why_illegal(Config(block=128), PROBLEM, fakes.H200)
    with pytest.raises(ZeroDivisionError):
        list(own.configs(PROBLEM, fakes.H200))
    with pytest.raises(ZeroDivisionError):
        hungry.from_distribution(OWN_DISTRIBUTION).why_illegal(Config(block=64), PROBLEM, fakes.H200, budget=1)


def test_the_configs_are_those_of_the_space():
    tiled = fakes.tiled()
    for problem in (PROBLEM, fakes.problem(hidden=64), fakes.problem(hidden=1)):
        assert list(tiled.configs(problem, fakes.H200)) == list(tiled.space.configs(problem, fakes.H200))
    assert list(fakes.implementation("plain").configs(PROBLEM, fakes.H200)) == [Config()]
    assert tiled.propose(PROBLEM, fakes.H200) == Config(block=32)


def test_identity():
    tiled = fakes.tiled(BACKWARD, "rocm")
    assert tiled.id == "rocm:tiled"
    assert tiled.key == ("affine", "default", "backward", "rocm", "tiled")
    assert not tiled.own
    marked = tiled.from_distribution(OWN_DISTRIBUTION)
    assert marked.own
    assert marked.key == tiled.key


# --- launch functions -------------------------------------------------------------------------------------------------


def test_bind_fills_in_all_but_the_tensors(package):
    package(late="def run(x, **rest):\n    return x, rest")
    late = fakes.implementation("late", launch="late:run")
    assert "late" not in sys.modules
    assert late.bind(Config(block=1), fakes.H200, {"gain": 2.0})(7) == (
        7,
        {"device": fakes.H200, "gain": 2.0, "block": 1},
    )
    assert late.bind(Config(), fakes.H200, {}, (True, False))(7)[1] == {"device": fakes.H200, "needs": (True, False)}
    assert "late" in sys.modules
    assert fakes.implementation("now").function() is fakes.forward


@pytest.mark.parametrize(
    ("text", "named", "why"),
    [
        ("import no_such_package", "broken:run", "No module named 'no_such_package'"),
        ("raise RuntimeError('no driver')", "broken:run", "RuntimeError: no driver"),
        ("def run(:", "broken:run", "SyntaxError"),
        ("x = 1", "broken:run", "AttributeError"),
        ("x = 1", "elsewhere:run", "No module named 'elsewhere'"),
        ("run = 3", "broken:run", "3"),
        ("raise SystemExit('no licence')", "broken:run", "SystemExit: no licence"),
    ],
)
def test_launch_functions_that_cannot_be_imported(package, text, named, why):
    package(broken=text)
    broken = fakes.implementation("broken", launch=named).from_distribution("some-plugin")
    with pytest.raises(PluginError) as caught:
        broken.function()
    assert "some-plugin" in caught.value.what
    assert named in caught.value.what
    assert why in caught.value.why
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert broken.why_not_importable() == f"{caught.value.what}: {caught.value.why}"
    assert fakes.implementation("fine").why_not_importable() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "sideways"},
        {"name": "two words"},
        {"name": ""},
        {"name": "reference"},
        {"launch": "module.function"},
        {"launch": "a:b:c"},
        {"capability": Capability("nvidia")},
        {"capability": Capability("cuda", "hopper")},
        {"space": ConfigSpace(gain=[1])},
        {"space": ConfigSpace(device=[1])},
        {"space": ConfigSpace(needs=[1])},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_cannot_be_registered(changes):
    with pytest.raises(RegistrationError):
        fakes.implementation(**{"name": "fine", **changes}).check(("gain",))
    fakes.implementation("fine").check(("gain",))


# --- source hashes ----------------------------------------------------------------------------------------------------


def test_the_source_hash_follows_the_file_and_imports_nothing(package):
    package(hashed__kernels="raise RuntimeError('imported')", hashed____init__="")
    first = source_hash("hashed.kernels:run")
    assert len(first) == 12
    assert "hashed.kernels" not in sys.modules
    assert source_hash("hashed.kernels:other") == first
    package(hashed__kernels="raise RuntimeError('imported')  # changed")
    assert source_hash("hashed.kernels:run") != first
    package(hashed__kernels="raise RuntimeError('imported')")
    assert source_hash("hashed.kernels:run") == first
    assert "hashed.kernels" not in sys.modules


@pytest.mark.parametrize(
    "line", ["from hashed import _rows", "from . import _rows", "from ._rows import x", "import hashed._rows"]
)
def test_the_source_hash_follows_helpers_of_the_package(package, line):
    package(hashed__kernels=line, hashed____init__="", hashed___rows="x = 1")
    first = source_hash("hashed.kernels:run")
    package(hashed___rows="x = 2")
    assert source_hash("hashed.kernels:run") != first


def test_a_source_that_cannot_be_found_has_a_hash_too(package):
    package(angry____init__="raise RuntimeError('no')", angry__kernels="")
    assert source_hash("no_such_module:run") == source_hash("angry.kernels:run") == source_hash("json.no:run")


def test_functions_of_a_module_share_its_hash():
    assert source_hash(fakes.forward) == source_hash(fakes.backward) != source_hash(pytest.raises)


def test_functions_without_a_source_differ_by_their_code():
    spaces = [{"__name__": "__nowhere__"} for _ in range(3)]
    for space, body in zip(spaces, ("x + 1", "x + 2", "x + 1"), strict=True):
        exec(f"def run(x): return {body}", space)
    one, two, three = (source_hash(space["run"]) for space in spaces)
    assert one == three != two


@pytest.mark.parametrize(
    ("kernel", "helper", "followed"),
    [
        ("from hashed.other import helper", "hashed__other/helper", True),
        ("from ..other.helper import x", "hashed__other/helper", True),
        ("from ..other import helper", "hashed__other/helper", True),
        ("import hashed.other.helper", "hashed__other/helper", True),
        ("from hashed import other", "hashed__other/__init__", True),
        ("from hashed import CONSTANT", "hashed____init__", True),
        ("from .. import CONSTANT", "hashed____init__", True),
        ("from hashed.other import CONSTANT", "hashed__other/__init__", True),
        ("from hashed.other import *", "hashed__other/__init__", True),
        ("from hashed.other import helper", "hashed__other/__init__", False),
        ("from hashed import other", "hashed____init__", False),
        ("from hashed.other import helper", "hashed__other/unused", False),
        ("import elsewhere", "elsewhere", False),
        ("import hashedness", "hashedness", False),
    ],
)
def test_the_source_hash_follows_imports_below_the_top_level_package(package, kernel, helper, followed):
    before = set(sys.modules)
    package(**{
        "hashed____init__": "", "hashed__part/__init__": "", "hashed__other/__init__": "", "hashed__other/helper": "",
        "hashed__other/unused": "", "elsewhere": "", "hashedness": "", "hashed__part/kernels": kernel,
    })  # fmt: skip
    first = source_hash("hashed.part.kernels:run")
    package(**{helper: "raise RuntimeError('imported')"})
    assert (source_hash("hashed.part.kernels:run") != first) is followed
    assert not {m for m in set(sys.modules) - before if m.startswith("hashed")}, "files are read, not imported"


def test_a_package_that_is_the_launch_module_and_a_flat_module(package):
    package(hashed____init__="from . import helper", hashed__helper="", flat="import flatter", flatter="")
    firsts = source_hash("hashed:run"), source_hash("flat:run")
    package(hashed__helper="x = 1", flatter="x = 1")
    assert source_hash("hashed:run") != firsts[0]
    assert source_hash("flat:run") == firsts[1]


def test_of_this_package_only_kernels_and_portable_implementations_are_followed(monkeypatch):
    from liger_registry import sources

    read = []
    real = sources._imports
    monkeypatch.setattr(sources, "_imports", lambda text, package: read.append(package) or real(text, package))
    source_hash.cache_clear()
    for module in ("kernels.rms_norm_split", "portable.rms_norm"):
        source_hash(f"liger_registry.{module}:run")
    source_hash.cache_clear()
    assert len(read) >= 3
    assert set(read) == {"liger_registry.kernels", "liger_registry.portable"}


NESTED = """
from liger_registry.sources import source_hash
space = {"__name__": "__nowhere__"}
exec("def run(x):\\n def inner(y):\\n  return y in {'a', 'b', 'c', 'd'} or (lambda: %s)\\n return inner(x)", space)
print(source_hash(space["run"]))
"""


def test_functions_without_a_source_have_one_hash_in_every_process():
    def run(seed, value):
        command = [sys.executable, "-c", NESTED % value]
        return subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout

    assert len({run(seed, "1") for seed in ("1", "2", "3")}) == 1
    assert run("1", "1") != run("1", "2")
