"""``group_norm`` on a GPU: the conformance suite, and more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from liger_registry import registry
from liger_registry.testing import conformance_cases


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", conformance_cases("group_norm", device="cuda"), ids=str)
def test_conformance(case):
    case()


def test_more_than_2_31_elements():
    x = torch.randn((3, 64, 2**31 // 128 + 16), device="cuda", dtype=torch.bfloat16)
    y = registry.get("group_norm")(x)
    x = x[-1:].clone()
    torch.testing.assert_close(y[-1:], torch.nn.functional.group_norm(x, 32, eps=1e-6), rtol=2e-2, atol=2e-2)
