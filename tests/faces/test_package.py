"""The package: what importing it brings in, and which names it has where."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import liger_registry.transformers as faces

SCRIPT = """
import sys
import torch
import liger_registry.transformers as faces
for name in faces.__all__:
    if name not in ("AutoLigerKernelForCausalLM", "LigerRegistryCallback"):  # subclasses of transformers' own
        getattr(faces, name)
_ = faces.apply_liger_kernel_to_llama
faces.apply(torch.nn.Linear(2, 2)).revert()
layer = faces.LigerRMSNorm(4)
loss = faces.LigerFusedLinearCrossEntropyLoss()(torch.ones(3, 4), layer(torch.ones(2, 4)), torch.tensor([0, 1]))
loss.backward()
loaded = [name for name in ("triton", "transformers", "liger_registry.testing") if name in sys.modules]
assert not loaded, loaded
print("done")
"""


def test_importing_and_using_it_loads_neither_triton_nor_transformers():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_names_are_those_of_the_package_and_of_their_modules():
    assert set(faces.__all__) <= set(dir(faces))
    for name in faces.__all__:
        assert getattr(faces, name).__name__ == name
        assert getattr(importlib.import_module("liger_registry.transformers"), name) is getattr(faces, name)
    functional = importlib.import_module("liger_registry.transformers.functional")
    assert all(getattr(functional, name) is getattr(faces, name) for name in faces.__all__ if hasattr(functional, name))


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="LigerNothing"):
        _ = faces.LigerNothing
    with pytest.raises(ImportError):
        from liger_registry.transformers import LigerNothing  # noqa: F401


@pytest.mark.parametrize("name", ["LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"])
def test_the_output_class_is_where_liger_kernel_has_it(name):
    home = importlib.import_module(getattr(faces, name).__module__)
    assert home.CrossEntropyOutput is faces.CrossEntropyOutput
