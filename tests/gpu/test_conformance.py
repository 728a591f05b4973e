"""The public conformance suite on the GPU at hand; run it with several workers, for it compiles more than it
computes."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry.testing import conformance_cases


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", conformance_cases("rms_norm", device="cuda"), ids=str)
def test_conformance(case):
    case()
