"""Every public name of liger-kernel 0.8.5 under ``liger-tune exec``: there, or not offered with a reason.

``names.txt`` was read off the released package: what its modules define and what they import from each other, without
those of its kernels for single vendors, which nothing imports but they themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from under_exec import python

from liger_registry.drop_in import finder, names

LIST = Path(__file__).parent / "names.txt"


def read() -> dict[str, list[str]]:
    """For each module its names, with a dash before those that are not offered."""
    found: dict[str, list[str]] = {}
    for line in LIST.read_text().splitlines()[1:]:
        if not line.startswith(" "):
            module, _, line = line.partition(":")
        found.setdefault(module, []).extend(line.split())
    return found


NAMES = read()
USED = (
    "AutoLigerKernelForCausalLM _apply_liger_kernel _apply_liger_kernel_to_instance MODEL_TYPE_TO_APPLY_LIGER_FN "
    "LigerRMSNorm LigerLayerNorm LigerSwiGLUMLP LigerGEGLUMLP LigerCrossEntropyLoss LigerForCausalLMLoss "
    "LigerFusedLinearCrossEntropyLoss LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss LigerRMSNormFunction "
    "LigerCrossEntropyFunction LigerSiLUMulFunction LigerRopeFunction liger_rotary_pos_emb liger_rms_norm"
)
ASK = """
    import importlib, json, sys
    asked = json.loads(open({path!r}).read())
    told = {{}}
    for module, names in asked.items():
        for name in names:
            try:
                value = getattr(importlib.import_module(module), name)
                told[f"{{module}}:{{name}}"] = ["there", getattr(value, "__module__", None) or ""]
            except Exception as error:
                told[f"{{module}}:{{name}}"] = [type(error).__name__, str(error)]
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What became of each name, in one process."""
    path = tmp_path_factory.mktemp("names") / "asked.json"
    path.write_text(json.dumps({module: [name.lstrip("-") for name in NAMES[module]] for module in NAMES}))
    return json.loads(python(ASK.format(path=str(path))).splitlines()[-1])


def test_the_list_is_whole():
    without_names = {"ops.experimental"}  # no module of its own there
    assert set(NAMES) == {"liger_kernel", *(f"liger_kernel.{module}" for module in names.MODULES - without_names)}
    assert sum(map(len, NAMES.values())) > 800


def test_every_name_is_there_or_says_why_not(told):
    wrong = {}
    for module, listed in NAMES.items():
        for name in listed:
            kind, text = told[f"{module}:{name.lstrip('-')}"]
            reasoned = kind == "NotOfferedError" and "\n  why: " in text and "\n  fix: " in text
            if not (reasoned if name.startswith("-") else kind == "there"):
                wrong[f"{module}.{name}"] = kind, text
    assert not wrong


def test_what_is_there_is_ours(told):
    homes = {home for kind, home in told.values() if kind == "there"}
    # Settings, versions and what is torch's own have no module of this package.
    foreign = {home for home in homes if not home.startswith("liger_registry.")}
    assert foreign <= {"", "functools", "packaging.version"}


def test_what_everybody_uses_is_offered():
    absent_names = {name for listed in NAMES.values() for name in listed if name.startswith("-")}
    assert not absent_names & {f"-{name}" for name in USED.split()}
    assert not [name for name in absent_names if name.startswith("-apply_liger_kernel_to_")]


MISSING = """
    import liger_kernel, liger_kernel.transformers, liger_kernel.transformers.dyt  # no error before a name is asked for
    from liger_registry.errors import NotOfferedError, NotOfferedImportError

    assert not hasattr(liger_kernel.transformers, "LigerDyT")
    assert getattr(liger_kernel.transformers.dyt, "LigerDyT", None) is None
    try:
        liger_kernel.transformers.LigerDyT
    except NotOfferedError as error:
        assert isinstance(error, AttributeError)
        assert "liger_kernel.transformers.LigerDyT is not offered" in str(error), error
        assert "no such operation" in error.why
    else:
        raise AssertionError
    for statement in (
        "from liger_kernel.transformers import LigerRMSNorm, LigerDyT",
        "from liger_kernel.transformers.dyt import LigerDyT",
        "from liger_kernel.ops.rms_norm import rms_norm_forward",
        "from liger_kernel import set_impl",
        "import liger_kernel.megatron",
        "import liger_kernel.ops.cutile.ops",
        "from liger_kernel.ops import backends; from liger_kernel.ops.backends import _ascend",
    ):
        try:
            exec(statement)
        except NotOfferedImportError as error:
            assert isinstance(error, ImportError) and error.why and error.fix, statement
        else:
            raise AssertionError(statement)
    # What liger-kernel has not either is Python's own error.
    for statement, kind in (
        ("import liger_kernel.nothing", ModuleNotFoundError),
        ("from liger_kernel.transformers import nothing", ImportError),
        ("liger_kernel.transformers.nothing", AttributeError),
    ):
        try:
            exec(statement)
        except kind as error:
            assert not isinstance(error, (NotOfferedError, NotOfferedImportError)), statement
            assert "nothing" in str(error)
        else:
            raise AssertionError(statement)
"""


FORMS = """
    import importlib.metadata, importlib.util, sys, warnings
    assert importlib.util.find_spec("liger_kernel") and "liger_kernel" not in sys.modules
    assert importlib.metadata.version("liger_kernel") == importlib.metadata.version("liger-kernel")
    assert importlib.metadata.packages_distributions()["liger_kernel"] == ["liger_kernel"]
    import liger_kernel
    assert liger_kernel.__version__ == importlib.metadata.version("liger_kernel") == "0.8.5+liger.registry"
    assert not {"torch", "transformers", "triton"} & set(sys.modules)

    # By attributes, without an import of the submodule.
    assert liger_kernel.transformers.rms_norm.LigerRMSNorm is liger_kernel.transformers.LigerRMSNorm
    import liger_registry.transformers, liger_registry.transformers.cross_entropy
    assert liger_kernel.transformers.LigerRMSNorm is liger_registry.transformers.LigerRMSNorm
    # A submodule of that name is liger_kernel's, though ours has an attribute of the same name by now.
    assert liger_kernel.transformers.cross_entropy.__name__ == "liger_kernel.transformers.cross_entropy"
    assert importlib.util.find_spec("liger_kernel.transformers.swiglu").name == "liger_kernel.transformers.swiglu"

    names = {}
    exec("from liger_kernel.transformers import *", names)
    assert {"LigerRMSNorm", "apply_liger_kernel_to_llama", "AutoLigerKernelForCausalLM"} <= set(names)
    exec("from liger_kernel.ops import *", names)
    assert "LigerRMSNormFunction" in names
    assert {"LigerRMSNorm", "apply_liger_kernel_to_llama"} <= set(dir(liger_kernel.transformers))
    assert "LigerDyT" not in dir(liger_kernel.transformers)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        functional = liger_kernel.transformers.functional
        functional.liger_rms_norm = len
        functional.of_ones_own = len
    assert functional.liger_rms_norm is len
    (warning,) = caught
    assert "liger_kernel.transformers.functional.liger_rms_norm is replaced" in str(warning.message)
    assert liger_registry.transformers.functional.liger_rms_norm is not len
"""


@pytest.mark.ci
def test_every_way_of_importing_and_what_is_not_offered():
    python(FORMS + MISSING)


@pytest.mark.ci
def test_settings_that_choose_kernels_are_said_to_have_no_effect():
    code = """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import liger_kernel.ops
        print(*(warning.message for warning in caught))
    """
    assert "LIGER_KERNEL_IMPL without effect" in python(code, LIGER_KERNEL_IMPL="cutile")
    assert python(code).strip() == ""


def test_without_exec_there_is_none():
    assert not any(isinstance(found, finder.Finder) for found in sys.meta_path)
    code = "import importlib.util; print(importlib.util.find_spec('liger_kernel'))"
    assert "liger_registry" not in python(code, execute=False)
