"""The public conformance suite on the GPU at hand, over every operation; run it with several workers, for it compiles
more than it computes."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry
from liger_registry.testing import conformance_cases

OPS = [op.name for op in registry.catalog.ops()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [c for name in OPS for c in conformance_cases(name, device="cuda")], ids=str)
def test_conformance(case):
    case()
