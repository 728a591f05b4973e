"""The public conformance suite, on this plugin's implementations."""

import pytest

from liger_registry.testing import conformance_cases


@pytest.mark.parametrize("case", conformance_cases("rms_norm", "vector_norm"), ids=str)
def test_conformance(case):
    case()
