"""The shipped tables: every entry is legal today, and answers for its device and, as a sibling, for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

import liger_registry_tunings
from liger_registry import Device, registry
from liger_registry.decision import SHIPPED, SIBLING
from liger_registry.store import read_file

ROOT = Path(liger_registry_tunings.__file__).parent
TABLES = sorted(ROOT.glob("v1/*/*/*/*.json"))


def test_there_are_tables():
    assert [path.relative_to(ROOT).as_posix() for path in TABLES] == ["v1/cuda/sm_90/h200-132/rms_norm.json"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_every_entry_is_valid_legal_and_has_its_provenance(path):
    table = read_file(path)
    assert table.skipped == ()
    assert table.directory == path.relative_to(ROOT / "v1").parts[:3]
    device = Device.from_json(table.device)
    for stored in table.decisions.values():
        problem = stored.problem
        item = registry.catalog.find(problem.op, problem.scheme, problem.phase, stored.choice.implementation)
        assert item.why_illegal(item.space.parse(stored.choice.config), problem, device) is None
        assert stored.time_us <= stored.default_us
        provenance = stored.provenance
        assert all((provenance.triton, provenance.source, provenance.torch, provenance.driver, provenance.date))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_its_device_is_answered_and_an_h100_by_it(path):
    table = read_file(path)
    for stored in table.decisions.values():
        own = registry.decide(stored.problem, Device.from_json(table.device))
        assert (own.source, own.choice) == (SHIPPED, stored.choice)
        for name in ("h100", "h100-pcie", "h100-nvl"):
            other = registry.decide(stored.problem, Device.parse(name))
            assert (other.source, other.choice) == (SIBLING, stored.choice)
            assert table.directory[2] in other.detail
        foreign = registry.decide(stored.problem, Device.parse("a100"))
        assert foreign.source == "heuristic"
