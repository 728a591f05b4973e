"""The public conformance suite over every operation in Triton's interpreter; a sample of it in the earlier tiers."""

from __future__ import annotations

import pytest

from liger_registry import registry
from liger_registry.testing import conformance_cases


def cases():
    """All cases; the first tier takes one in 40 of each operation, the second one in 24, the last all of them."""
    for op in registry.catalog.ops():
        for number, case in enumerate(conformance_cases(op.name, device="interpreter")):
            marks = () if number % 40 == 7 else (pytest.mark.ci,) if number % 24 == 3 else (pytest.mark.slow,)
            yield pytest.param(case, id=str(case), marks=marks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", list(cases()))
def test_conformance(case):
    case()
