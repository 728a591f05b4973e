from __future__ import annotations

import planted
import pytest

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.tuning.candidates import Candidate
from liger_registry.tuning.worker import Worker

CPU = Device.parse("cpu")
PLAIN = Candidate(planted.PLAIN, Config())
FAULTING = Candidate(planted.implementation(planted.illegal_access), Config())


@pytest.fixture
def worker():
    made = Worker(CPU, "cpu", "planted:faulting", "planted:clock")
    yield made
    made.close()


def test_a_process_that_saw_a_fault_of_the_device_is_not_used_again(worker):
    problem = planted.problem()
    assert worker.verify(problem, PLAIN).status == "ok"
    assert worker.verify_whole(problem, PLAIN).status == "ok"
    assert worker.starts == 1
    outcomes = worker.measure(problem, [PLAIN, FAULTING], 1e3)
    assert [o.status for o in outcomes] == ["", "crash"]
    assert worker._process is None
    assert worker.verify(problem, PLAIN).status == "ok"
    assert worker.starts == 2
