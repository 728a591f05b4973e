"""``softmax`` on a GPU: the conformance suite, and more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry
from liger_registry.testing import conformance_cases


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", conformance_cases("softmax", device="cuda"), ids=str)
def test_conformance(case):
    case()


def test_more_than_2_31_elements():
    x = torch.randn((2**31 // 4096 + 3, 4096), device="cuda", dtype=torch.bfloat16)
    y = registry.get("softmax")(x)
    x = x[-1:].clone()
    torch.testing.assert_close(y[-1:], torch.softmax(x, -1), rtol=2e-2, atol=2e-2)
