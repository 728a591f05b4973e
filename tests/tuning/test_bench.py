from __future__ import annotations

import planted
import pytest
import torch

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.errors import CompileError, UnknownImplementationError
from liger_registry.tuning.arguments import Arguments
from liger_registry.tuning.bench import Bench, foreign_processes, resolve
from liger_registry.tuning.candidates import Candidate
from liger_registry.tuning.outcome import failure

CPU = Device.parse("cpu")


class OutOfResources(Exception):
    """As Triton calls it."""


class AcceleratorError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "status", "poisoned"),
    [
        (MemoryError(), "memory", False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory", False),
        (RuntimeError("CUDA error: out of memory"), "memory", False),
        (OutOfResources("shared memory, Required: 300000"), "resources", False),
        (CompileError("k does not compile"), "compile", False),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), "crash", True),
        (RuntimeError("HIP error: misaligned address"), "crash", True),
        (ValueError("a\nb"), "error", False),
    ],
)
def test_what_exceptions_mean(error, status, poisoned):
    outcome = failure(error)
    assert (outcome.status, outcome.poisoned) == (status, poisoned)
    assert "\n" not in outcome.detail


@pytest.fixture
def bench():
    planted.reset()
    made = Bench(planted.faulty(), CPU, "cpu", planted.clock)
    yield made
    made.close()


def candidate(name, **config):
    return Candidate({"plain": planted.PLAIN, **planted.FAULTY}[name], Config(config))


def test_a_failure_in_a_batch_fails_the_one_that_was_running(bench):
    outcomes = bench.measure(planted.problem(), [candidate("plain"), candidate("raises"), candidate("plain")], 1e3)
    assert [o.status for o in outcomes] == ["", "error", ""]
    assert "planted" in outcomes[1].detail
    (outcome,) = bench.measure(planted.problem(), [candidate("plain")], 1e3)
    assert (outcome.status, outcome.time_us, outcome.extra_bytes) == ("ok", pytest.approx(100), None)


def test_measuring_holds_no_graph(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(
        planted.PLAIN.__class__, "function", lambda self: lambda *a, **k: seen.append(torch.is_grad_enabled())
    )
    bench.measure(planted.problem(), [candidate("plain")], 1e3)
    assert set(seen) == {False}


def test_tensors_are_let_go(bench):
    bench.measure(planted.problem(), [candidate("plain")], 1e3)
    assert bench._tensors is not None
    bench.close()
    assert bench._tensors is None
    bench.probe(planted.problem(), candidate("plain"))
    assert bench._tensors is None


def test_nothing_to_compile_on_a_cpu(bench):
    assert [o.status for o in bench.compile(planted.problem(), [candidate("plain")] * 2)] == ["ok", "ok"]


def test_probing_grows_the_problem_until_the_answer_is_clear(bench):
    assert bench.probe(planted.problem(rows=1024), candidate("plain")).time_us == pytest.approx(100)
    assert bench.probe(planted.problem(rows=1024), candidate("raises")).status == "error"


def test_arguments_of_backward_have_the_contracts_shapes():
    problem = planted.problem(op="twoway", scheme="saving", phase="backward")
    for device in ("cpu", "meta"):
        dy, x, w, gw = Arguments.of(planted.TWOWAY, problem, torch.device(device)).tensors
        assert (dy.shape, x.shape, w.shape, gw.shape) == ((64, 200), (64, 200), (200,), (200,))
        assert {t.device.type for t in (dy, x, w, gw)} == {device}


def test_names_are_resolved_in_this_catalogue(bench):
    found = resolve(bench.catalog, planted.problem(), "any:wrong_tail", {"block": 64})
    assert (found.implementation.id, found.config) == ("any:wrong_tail", Config(block=64))
    with pytest.raises(UnknownImplementationError):
        resolve(bench.catalog, planted.problem(), "any:not_there", {})


def test_no_foreign_process_is_seen_without_a_gpu(bench):
    assert foreign_processes(torch.device("cpu")) is False
    assert bench.describe() == {"torch": torch.__version__, "driver": "", "clocks": ""}
