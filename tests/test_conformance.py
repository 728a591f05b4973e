"""The public conformance suite over every operation and every implementation that runs on a CPU."""

from __future__ import annotations

import pytest

from liger_registry import registry
from liger_registry.testing import conformance_cases

OPS = [op.name for op in registry.catalog.ops()]


@pytest.mark.parametrize("case", [c for name in OPS for c in conformance_cases(name, device="cpu")], ids=str)
def test_conformance(case):
    case()


def test_every_operation_has_a_formula_and_a_competitor_on_the_cpu():
    for name in OPS:
        there = {i.name for i in registry.catalog.implementations(name) if i.capability.vendor in ("any", "cpu")}
        assert there, name


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_every_operation_has_two_real_implementations_of_each_phase_on_gpus(vendor):
    """Composites run PyTorch's products and stages that are operations of their own: these are counted for them."""
    for name in OPS:
        everything = registry.catalog.implementations(name)
        for scheme in {i.scheme for i in everything}:
            for phase in ("forward", "backward"):
                there = [i for i in everything if (i.scheme, i.phase) == (scheme, phase)]
                if any(i.stages is not None for i in everything) or (registry.op(name).private and not there):
                    continue
                assert len({i.name for i in there if i.capability.vendor == vendor}) >= 2, (name, scheme, phase)
