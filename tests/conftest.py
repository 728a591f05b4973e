"""What holds for every test: none sees the user's settings, tables or network, and none leaves torch changed."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "helpers"))  # what several test modules share
MARKER_OF_DIRECTORY = {"interpreter": "interpreter", "compile": "compiler", "gpu": "gpu"}
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
SEED = 20240607

# The same examples on every run and machine; no deadline, because the cores are shared.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Turn away from the user's files what is read while test modules are imported, before any fixture runs."""
    for name in [name for name in os.environ if name.startswith("LIGER_")]:
        del os.environ[name]
    directory = tempfile.mkdtemp(prefix="liger-registry-tests-")
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    os.environ["LIGER_TUNE_CACHE_DIR"] = directory
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep interpreter tests and all others in processes of their own: Triton reads TRITON_INTERPRET when imported."""
    interpreter = HERE / "interpreter"
    inside = collection_path == interpreter or interpreter in collection_path.parents
    if inside != INTERPRETING and collection_path not in (HERE, *HERE.parents):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the directory they lie in, before -m is applied."""
    for item in items:
        if item.path.is_relative_to(HERE):
            marker = MARKER_OF_DIRECTORY.get(item.path.relative_to(HERE).parts[0])
            if marker is not None:
                item.add_marker(marker)


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without any LIGER_* but a cache directory of the test's own, which the public registry reads."""
    for name in [name for name in os.environ if name.startswith("LIGER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LIGER_TUNE_CACHE_DIR", str(tmp_path / "liger-cache"))
    if (runtime := sys.modules.get("liger_registry.runtime")) is not None:
        runtime.registry.reload()


@pytest.fixture(autouse=True)
def own_torch() -> Iterator[None]:
    """Fixed seeds, and torch's global state put back afterwards."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    dtype = torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_grad_enabled(grad)
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (deterministic, warn_only):  # the setter imports the compiler, a second or two
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    if "torch._dynamo" in sys.modules:
        # Compiled code and counters of one test would change what the next one compiles.
        torch._dynamo.reset()
