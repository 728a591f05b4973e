"""What an earlier run found is taken for true, but for failures that may have been the machine's."""

from __future__ import annotations

import datetime
import tempfile
from dataclasses import replace

import planted
import pytest

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.store import TableStore
from liger_registry.table import Choice, Sample
from liger_registry.tuning import provenance
from liger_registry.tuning.tuner import tune

CPU = Device.parse("cpu")
DAY = datetime.timedelta(days=1)
ABOUT = {"torch": provenance.torch.__version__}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    planted.reset()
    return TableStore(tmp_path / "tables")


@pytest.fixture
def later(monkeypatch):
    real = provenance._now

    def move(by):
        monkeypatch.setattr(provenance, "_now", lambda: real() + by)

    return move


def run(catalog, store, problem=None):
    options = {"device": CPU, "store": store, "isolate": False, "clock_source": "planted:clock"}
    return tune([problem or planted.problem()], catalog=catalog, **options).rows[0]


def sample(status, detail=""):
    made_of = provenance.provenance_of(planted.PLAIN, ABOUT)
    return Sample(planted.problem(), Choice("any:plain", Config()), status, None, None, detail, "p", made_of)


@pytest.mark.parametrize("status", ["ok", "noisy", "wrong", "compile", "resources"])
def test_what_the_code_decides_is_believed_for_ever(status, later):
    found = sample(status)
    later(1000 * DAY)
    assert provenance.believed(found, planted.PLAIN)
    other = replace(found, provenance=replace(found.provenance, source="0" * 12))
    assert not provenance.believed(other, planted.PLAIN), "it is of other code"


@pytest.mark.parametrize("status", ["memory", "timeout", "crash", "error"])
def test_what_the_machine_may_have_done_is_believed_for_a_day(status, later):
    found = sample(status)
    assert provenance.believed(found, planted.PLAIN)
    for changed in ({"torch": "2.0"}, {"package": "planted 9"}, {"date": ""}, {"date": "2024-01-01T00:00:00"}):
        assert not provenance.believed(replace(found, provenance=replace(found.provenance, **changed)), planted.PLAIN)
    later(0.9 * DAY)
    assert provenance.believed(found, planted.PLAIN)
    later(1.1 * DAY)
    assert not provenance.believed(found, planted.PLAIN)
    assert provenance.believed(replace(found, detail="too slow here: one call would take 4.0 s"), planted.PLAIN)


def test_a_failure_that_passes_is_measured_again(store, later, monkeypatch):
    catalog = planted.catalog(planted.PLAIN, planted.implementation(planted.fast))
    function = planted.PLAIN.__class__.function

    def short_of_memory(self):
        return planted.no_memory if self.name == "fast" else function(self)

    with monkeypatch.context() as patch:
        patch.setattr(planted.PLAIN.__class__, "function", short_of_memory)
        row = run(catalog, store)
    assert (row.status, row.choice.implementation) == ("default", "any:plain")
    assert (run(catalog, store).status, run(catalog, store).measured) == ("reused", 0)
    later(2 * DAY)
    row = run(catalog, store)
    assert (row.status, row.measured, row.reused) == ("tuned", 1, 1)
    assert row.choice.implementation == "any:fast"
    later(9 * DAY)
    assert (run(catalog, store).status, run(catalog, store).measured) == ("reused", 0)


def test_a_failure_that_stays_does_not_undo_the_decision(store, later):
    catalog = planted.catalog(planted.PLAIN, planted.implementation(planted.fast), planted.FAULTY["raises"])
    assert run(catalog, store).choice.implementation == "any:fast"
    later(2 * DAY)
    row = run(catalog, store)
    assert (row.status, row.measured, row.choice.implementation) == ("reused", 1, "any:fast")
    assert run(catalog, store).measured == 0


def test_a_decision_against_another_default_is_taken_anew(store):
    space = ConfigSpace(cost=[100, 80, 79.5])
    was = planted.implementation(planted.plain, space=space, heuristic=lambda p, d: Config(cost=100))
    row = run(planted.catalog(was), store)
    assert (row.status, row.choice.config) == ("tuned", Config(cost=80))
    # 79.5 is no 2 % better than 80: measured against what serves today, nothing else is worth it.
    now = replace(was, heuristic=lambda p, d: Config(cost=79.5))
    row = run(planted.catalog(now), store)
    assert (row.status, row.measured) == ("default", 0)
    assert row.choice == row.default == Choice("any:plain", Config(cost=79.5))
