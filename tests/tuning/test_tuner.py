from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import planted
import pytest
import torch

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.errors import MeasurementError, SettingError, TuningBusyError
from liger_registry.problem import BACKWARD, SCHEME
from liger_registry.store import TableStore
from liger_registry.table import Choice
from liger_registry.tuning import bench as bench_module
from liger_registry.tuning import lock as lock_module
from liger_registry.tuning import worker as worker_module
from liger_registry.tuning.report import Progress
from liger_registry.tuning.tuner import shard, tune
from liger_registry.tuning.worker import Limits

CPU = Device.parse("cpu")
PROTOCOL = "cpu-clock-1"


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    """Tests must not wait for one another's tuners."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    planted.reset()


@pytest.fixture
def store(tmp_path):
    return TableStore(tmp_path / "tables")


def run(problems, catalog, store, **options):
    """In this process with the planted clock, unless options say otherwise."""
    options = {"isolate": False, "clock_source": "planted:clock", **options}
    return tune(problems, catalog=catalog, device=CPU, store=store, **options)


def statuses(store, problem):
    return {s.choice.implementation: s.status for s in store.load(CPU, problem.op).samples_of(problem)}


# --- the decision -----------------------------------------------------------------------------------------------------


def test_slow_default_is_replaced_and_persisted(store, tmp_path):
    problem = planted.problem()
    (row,) = run([problem], planted.sized(), store).rows
    assert row.status == "tuned"
    assert row.choice == Choice("any:blocks", Config(block=128))
    assert row.default == Choice("any:plain", Config())
    assert (row.time_us, row.default_us) == (pytest.approx(25), pytest.approx(100))
    assert row.speedup == pytest.approx(4)
    assert (row.measured, row.reused) == (4, 0)
    stored = TableStore(tmp_path / "tables").load(CPU, "affine").decision(problem, PROTOCOL)
    assert stored.choice == row.choice
    assert stored.default == row.default
    assert stored.provenance.date.endswith("+00:00")
    assert stored.provenance.torch
    assert len(stored.provenance.source) == 12


def test_best_default_stays(store):
    (row,) = run([planted.problem()], planted.best_default(), store).rows
    assert row.status == "default"
    assert row.choice == row.default == Choice("any:plain", Config())
    assert row.speedup == 1


@pytest.mark.parametrize(("cost", "status"), [(99, "default"), (97, "tuned")])
def test_gains_below_two_percent_are_not_worth_it(store, cost, status):
    space = ConfigSpace(cost=[100, cost])
    only = planted.implementation(planted.plain, space=space, heuristic=lambda p, d: Config(cost=100))
    (row,) = run([planted.problem()], planted.catalog(only), store).rows
    assert row.status == status


def test_wrong_but_fast_never_wins(store):
    problem = planted.problem(hidden=200)
    catalog = planted.catalog(planted.PLAIN, planted.FAULTY["wrong_tail"])
    (row,) = run([problem], catalog, store).rows
    assert row.choice.implementation == "any:plain"
    assert statuses(store, problem)["any:wrong_tail"] == "wrong"
    right = planted.problem(hidden=256)
    (row,) = run([right], catalog, store).rows
    assert row.choice.implementation == "any:wrong_tail", "its blocks divide this width"


def test_every_fault_fails_its_candidate_alone(store):
    problem = planted.problem()
    (row,) = run([problem], planted.faulty(), store).rows
    assert row.status == "tuned"
    assert row.choice.implementation == "any:fast"
    assert statuses(store, problem) == {
        "any:plain": "ok", "any:fast": "ok", "any:raises": "error", "any:no_memory": "memory",
        **{f"any:{n}": "wrong" for n in (
            "ignores_gain", "reads_empty", "gives_nan", "wrong_shape", "wrong_tail", "writes_input", "out_of_bounds",
            "random_bits", "dense_weight", "dirty_scratch",
        )},
    }  # fmt: skip


def test_a_default_that_is_wrong_makes_room_for_the_next(store):
    catalog = planted.catalog(planted.implementation(planted.gives_nan, "plain"), planted.implementation(planted.fast))
    (row,) = run([planted.problem()], catalog, store).rows
    assert row.status == "default"
    assert row.default == row.choice == Choice("any:fast", Config())


def test_when_nothing_passes_nothing_is_decided(store):
    problem = planted.problem()
    catalog = planted.catalog(planted.FAULTY["raises"], planted.FAULTY["gives_nan"])
    (row,) = run([problem], catalog, store).rows
    assert row.status == "failed"
    assert "planted" in row.detail
    assert row.speedup is None
    assert store.load(CPU, "affine").decision(problem) is None
    assert run([problem], catalog, store).measured == 0


def test_nothing_legal(store):
    never = planted.implementation(
        planted.plain, space=ConfigSpace().where(lambda c, p, d: False, "never"), heuristic=lambda p, d: Config()
    )
    (row,) = run([planted.problem()], planted.catalog(never), store).rows
    assert row.status == "no implementation"
    assert "never" in row.detail


def test_backward(store):
    slow = planted.implementation(planted.backward, "plain", phase=BACKWARD)
    wrong = planted.FAULTY_BACKWARD["backward_drops_row"]
    problem = planted.problem(phase=BACKWARD)
    (row,) = run([problem], planted.catalog(slow, wrong), store).rows
    assert row.choice.implementation == "any:plain"
    assert statuses(store, problem) == {"any:plain": "ok", "any:backward_drops_row": "wrong"}


def test_noise_keeps_the_default_unless_the_gain_dwarfs_it(store, monkeypatch):
    ticks = iter(range(10**9))
    real = planted.clock

    def drifting():
        # Each look at the clock is later than the last by more: the anchor grows between a block's ends.
        planted.NOW[0] += 1e-7 * next(ticks)
        return real()

    monkeypatch.setattr(planted, "clock", drifting)
    space = ConfigSpace(cost=[100, 80])
    only = planted.implementation(planted.plain, space=space, heuristic=lambda p, d: Config(cost=100))
    problem = planted.problem()
    (row,) = run([problem], planted.catalog(only), store).rows
    assert row.status == "noisy"
    assert row.choice == row.default
    assert "noise" in row.detail
    assert statuses(store, problem) == {"any:plain": "noisy"}


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_second_run_measures_nothing_and_starts_nothing(store, monkeypatch):
    problems = [planted.problem(), planted.problem(rows=128)]
    first = run(problems, planted.sized(), store)
    assert first.measured == 8
    calls = len(planted.CALLS)
    monkeypatch.setattr(worker_module.Worker, "_started", lambda self: pytest.fail("a worker was started"))
    second = run(problems, planted.sized(), store, isolate=True)
    assert second.measured == 0
    assert [row.status for row in second.rows] == ["reused", "reused"]
    assert [row.reused for row in second.rows] == [4, 4]
    assert [row.choice for row in second.rows] == [row.choice for row in first.rows]
    assert len(planted.CALLS) == calls


@pytest.mark.parametrize(("block", "winner"), [(256, 256), (16, 128)])
def test_a_config_added_later_is_measured_alone(store, block, winner):
    problem = planted.problem()
    run([problem], planted.sized(), store)
    planted.CALLS.clear()
    more = replace(planted.BLOCKED, space=ConfigSpace(block=[32, 64, 128, block]))
    (row,) = run([problem], planted.catalog(planted.PLAIN, more), store).rows
    assert (row.measured, row.reused) == (1, 4)
    assert row.choice == Choice("any:blocks", Config(block=winner))
    losers = {"blocks32", "blocks64"}
    assert not losers & set(planted.CALLS)
    if winner == 128:
        assert set(planted.CALLS) == {"blocks16"}, "what cannot win is not measured against the others"


def test_force_measures_anew(store):
    run([planted.problem()], planted.sized(), store)
    assert run([planted.problem()], planted.sized(), store, force=True).measured == 4


@pytest.mark.parametrize("what", ["source", "triton"])
def test_changed_code_is_measured_anew(store, monkeypatch, what):
    vendor = replace(planted.BLOCKED, capability=replace(planted.BLOCKED.capability, vendor="cpu"))
    catalog = planted.catalog(planted.PLAIN, vendor)
    run([planted.problem()], catalog, store)
    if what == "source":
        monkeypatch.setattr("liger_registry.tuning.provenance.source_hash", lambda launch: "0" * 12)
    else:
        monkeypatch.setattr("liger_registry.tuning.provenance.triton_version", lambda: "99.9")
    # Plain PyTorch is the same whatever Triton there is.
    assert run([planted.problem()], catalog, store).measured == (4 if what == "source" else 3)


def test_samples_are_kept_as_they_come(store, monkeypatch):
    problem = planted.problem()

    def stop(progress):
        if "block=64" in progress.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([problem], planted.sized(), store, progress=stop)
    assert len(store.load(CPU, "affine").samples_of(problem)) == 2
    (row,) = run([problem], planted.sized(), store).rows
    assert (row.measured, row.reused) == (2, 2)
    assert row.status == "tuned"


def test_the_time_being_up_stops_cleanly(store):
    problems = [planted.problem(), planted.problem(rows=128)]
    report = run(problems, planted.sized(), store, budget_s=0)
    assert [row.status for row in report.rows] == ["untuned", "untuned"]
    assert report.untuned == tuple(problems)
    assert report.measured == 0


def test_verification_is_shared_by_row_buckets(store, monkeypatch):
    count = []
    real = bench_module.verify
    monkeypatch.setattr(bench_module, "verify", lambda *a, **k: count.append(k["full"]) or real(*a, **k))
    run([planted.problem(rows=64), planted.problem(rows=128)], planted.sized(), store)
    assert count == [False] * 4 + [True] * 4, "then all of them are finalists, and verified in full"
    run([planted.problem(rows=64, hidden=77)], planted.sized(), store)
    assert len(count) == 16


def test_problems_a_cpu_is_too_slow_for(store):
    # 6,400 calls' worth of one second at the full size, judged by calls of 256 rows.
    slow = planted.implementation(
        planted.plain, space=ConfigSpace(cost=[10**6]), heuristic=lambda p, d: Config(cost=10**6)
    )
    problem = planted.problem(rows=1024)
    (row,) = run([problem], planted.catalog(slow), store).rows
    assert row.status == "too slow here"
    assert "4.0 s" in row.detail
    calls = len(planted.CALLS)
    (row,) = run([problem], planted.catalog(slow), store).rows
    assert row.status == "too slow here"
    assert len(planted.CALLS) == calls


def test_progress_tells_each_step(store):
    seen: list[Progress] = []
    problems = [planted.problem(), planted.problem(rows=128)]
    run(problems, planted.sized(), store, progress=seen.append)
    assert [p.done for p in seen if p.row is not None] == [1, 2]
    assert {p.total for p in seen} == {2}
    assert any("any:blocks(block=64)" in p.text for p in seen)


def test_a_device_that_is_not_here(store):
    with pytest.raises(SettingError, match="cannot be measured on cpu"):
        tune([], catalog=planted.sized(), device=Device.parse("h200"), store=store, torch_device="cpu")


# --- schemes ----------------------------------------------------------------------------------------------------------


def test_the_scheme_with_the_smaller_sum_wins(store):
    problem = planted.problem(op="twoway", phase=SCHEME)
    catalog = planted.two_schemes()
    (row,) = run([problem], catalog, store).rows
    assert row.status == "tuned"
    assert row.choice == Choice("scheme:saving", Config())
    assert row.default == Choice("scheme:lean", Config())
    assert (row.time_us, row.default_us) == (pytest.approx(150), pytest.approx(200))
    (again,) = run([problem], catalog, store).rows
    assert again.status == "reused"
    table = store.load(CPU, "twoway")
    assert {(p.scheme, p.phase) for p in table.problems} == {
        ("", "scheme"), ("lean", "forward"), ("lean", "backward"), ("saving", "forward"), ("saving", "backward"),
    }  # fmt: skip


def test_without_a_gradient_forward_alone_decides(store):
    (row,) = run([planted.problem(op="twoway", phase=SCHEME, needs="")], planted.two_schemes(), store).rows
    assert row.status == "default"
    assert row.choice == Choice("scheme:lean", Config())


def test_one_scheme_is_no_choice(store):
    (row,) = run([planted.problem(phase=SCHEME)], planted.sized(), store).rows
    assert row.status == "no implementation"
    assert "one scheme" in row.detail


# --- the worker -------------------------------------------------------------------------------------------------------


def test_what_dies_or_hangs_fails_alone(store):
    problem = planted.problem()
    (row,) = run(
        [problem], planted.deadly(), store, isolate=True, catalog_source="planted:deadly", limits=Limits(candidate_s=3)
    ).rows
    assert row.status == "tuned"
    assert row.choice.implementation == "any:fast"
    assert statuses(store, problem) == {
        "any:plain": "ok", "any:aborts": "crash", "any:hangs": "timeout", "any:leaves": "crash", "any:fast": "ok",
    }  # fmt: skip
    details = {s.choice.implementation: s.detail for s in store.load(CPU, "affine").samples_of(problem)}
    assert "by signal 6" in details["any:aborts"]
    assert "exit code 0" in details["any:leaves"]
    assert "3 s" in details["any:hangs"]


def test_a_tuner_that_is_killed_leaves_what_it_had_measured(store, tmp_path):
    script = (
        "import sys, planted\n"
        "from pathlib import Path\n"
        "from liger_registry.device import Device\n"
        "from liger_registry.store import TableStore\n"
        "from liger_registry.tuning.tuner import tune\n"
        "tune([planted.problem()], catalog=planted.deadly(), device=Device.parse('cpu'),\n"
        "     store=TableStore(Path(sys.argv[1])), isolate=False, clock_source='planted:clock')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "tables")], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == -6
    assert statuses(store, planted.problem()) == {"any:plain": "ok"}


def test_a_worker_outlives_neither_its_parent_nor_its_use(store):
    worker = worker_module.Worker(CPU, "cpu", "planted:sized", "planted:clock")
    assert worker.describe()["torch"] == torch.__version__
    process = worker._process
    worker.close()
    assert process.returncode == 0
    script = (
        "import os, signal, sys, planted\n"
        "from liger_registry.device import Device\n"
        "from liger_registry.tuning.worker import Worker\n"
        "worker = Worker(Device.parse('cpu'), 'cpu', 'planted:sized', 'planted:clock')\n"
        "worker.describe()\n"
        "print(worker._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=120, text=True)
    assert done.returncode == -9
    for _ in range(200):
        if not _alive(int(done.stdout)):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the worker is still there")


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_cannot_start_is_named(store):
    with pytest.raises(MeasurementError, match=r"does not start[^$]*planted"):
        run([planted.problem()], planted.sized(), store, isolate=True, catalog_source="planted:not_there")


# --- the lock ---------------------------------------------------------------------------------------------------------


def _hold(directory, ready, release):
    tempfile.gettempdir = lambda: directory
    with lock_module.device_lock("cpu"):
        ready.set()
        release.wait(60)


def test_two_tuners_keep_apart(store, tmp_path):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), ready, release))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(TuningBusyError, match="another process"):
            run([planted.problem()], planted.sized(), store, lock_timeout_s=0.1)
    finally:
        release.set()
        other.join(60)
    began = time.monotonic()
    assert run([planted.problem()], planted.sized(), store, lock_timeout_s=30).rows[0].status == "tuned"
    assert time.monotonic() - began < 30


@pytest.fixture
def held(tmp_path):
    """Another process that tunes on the CPU."""
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), ready, release))
    other.start()
    assert ready.wait(60)
    yield
    release.set()
    other.join(60)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("lock_timeout_s", [60.0, -1.0])
def test_the_budget_bounds_the_wait_for_the_device(store, lock_timeout_s):
    began = time.monotonic()
    if lock_timeout_s < 0:  # as ranks that share a device wait: what the time did not suffice for is untuned
        rows = run([planted.problem()], planted.sized(), store, budget_s=0.3, lock_timeout_s=lock_timeout_s).rows
        assert [row.status for row in rows] == ["untuned"]
    else:
        with pytest.raises(TuningBusyError, match="another process"):
            run([planted.problem()], planted.sized(), store, budget_s=0.3, lock_timeout_s=lock_timeout_s)
    assert time.monotonic() - began < 10


@pytest.mark.usefixtures("held")
def test_a_tuner_that_does_not_wait(store):
    began = time.monotonic()
    with pytest.raises(TuningBusyError) as caught:
        run([planted.problem()], planted.sized(), store, lock_timeout_s=0)
    assert time.monotonic() - began < 5
    assert "0 s" not in caught.value.why


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shards_cover_everything_once_in_any_order(world):
    problems = [
        planted.problem(rows=r, hidden=h, phase=p) for r in (1, 2, 4) for h in (8, 9) for p in ("forward", BACKWARD)
    ]
    shares = [shard(problems, rank, world) for rank in range(world)]
    assert sorted(p.text for share in shares for p in share) == sorted(p.text for p in problems)
    assert shares == [shard(reversed(problems), rank, world) for rank in range(world)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 2
    for share in shares:
        assert {p.having() for p in share if p.phase == BACKWARD} == {
            planted.problem(rows=p.rows, hidden=p.hidden, phase=BACKWARD) for p in share
        }
