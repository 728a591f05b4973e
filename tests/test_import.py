"""Importing is cheap and needs neither Triton nor a GPU. Every case has a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HEAVY = ("torch", "triton", "transformers", "numpy")


def run(code: str) -> str:
    """Run code in a fresh interpreter that turns warnings into errors; what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> list[str]:
    """Those of the heavy packages that are loaded after the code ran."""
    names = run(f"import sys\n{textwrap.dedent(code)}\nprint('\\nloaded', *[m for m in {HEAVY} if m in sys.modules])")
    return names.splitlines()[-1].split()[1:]


def test_the_package_loads_nothing_heavy():
    assert loaded("import liger_registry\nliger_registry.__version__, dir(liger_registry)") == []


@pytest.mark.parametrize("package", ["liger_registry.errors", "liger_registry.settings", "liger_registry_tunings"])
def test_plain_modules_load_nothing_heavy(package):
    assert loaded(f"import {package}") == []


@pytest.mark.parametrize("package", ["liger_registry_cuda", "liger_registry_rocm", "liger_registry.portable"])
def test_plugins_load_no_triton_before_a_launch(package):
    assert "triton" not in loaded(f"import {package}")


@pytest.mark.parametrize("arguments", [["--help"], ["warmup", "--help"]], ids=" ".join)
def test_the_command_helps_without_torch(arguments):
    code = f"""
        from liger_registry.cli import main
        sys.argv = ["liger-tune", *{arguments}]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
    """
    assert loaded(code) == []


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "liger_registry.cli", "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "warmup" in done.stdout


def test_every_public_name_resolves():
    assert int(run("import liger_registry as l; print(len([getattr(l, name) for name in l.__all__]))")) > 0


def test_all_but_device_code_imports_with_triton_blocked():
    code = """
        import importlib, pkgutil, sys

        sys.modules["triton"] = None  # makes every import of it an ImportError
        for root in ("liger_registry", "liger_registry_cuda", "liger_registry_rocm", "liger_registry_tunings"):
            package = importlib.import_module(root)
            for module in pkgutil.walk_packages(package.__path__, f"{root}."):
                if ".kernels." not in module.name and not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
                    print(module.name)
    """
    assert "liger_registry.errors" in run(code).splitlines()


def test_importing_touches_no_gpu():
    code = """
        import liger_registry, torch
        for name in liger_registry.__all__:
            getattr(liger_registry, name)
        assert not torch.cuda.is_initialized()
    """
    run(code)
