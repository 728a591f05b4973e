"""The callback for trainers: what it reports, what it records, and that it measures only if it is asked to."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from liger_registry import registry
from liger_registry.device import Device
from liger_registry.errors import TuningBusyError
from liger_registry.transformers import LigerRegistryCallback, apply, callback
from liger_registry.tuning import distributed
from liger_registry.tuning.report import Row, TuneReport

CPU = Device.of(torch.device("cpu"))


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
        )
    )


def run(directory, made, *callbacks, **more):
    rows = torch.randint(1, 40, (8, 9), generator=torch.Generator().manual_seed(2))
    args = TrainingArguments(
        str(directory),
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainer's own
        trainer = Trainer(
            made, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=list(callbacks)
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.ci
def test_it_says_what_was_applied_and_what_was_missed(tmp_path):
    plain = run(tmp_path, model())
    made, said = model(), []
    handle = apply(made)
    told = LigerRegistryCallback(say=said.append)
    assert run(tmp_path, made, told) == pytest.approx(plain, rel=1e-4)
    assert told.applied == [handle]
    first, last = said
    assert first.startswith("liger-registry: LlamaForCausalLM\n")
    assert "rms_norm" in first
    assert "fused_linear_cross_entropy" in first
    count = len(told.missed)
    assert count > 5
    assert {"swiglu", "fused_linear_cross_entropy"} <= {problem.op for problem in told.missed}
    assert f"{count} problems of this run are not measured on {CPU.fingerprint};" in last
    assert last.endswith("liger-tune warmup --from-misses")
    # The log is what that command reads.
    logged = [json.loads(line) for line in registry.misses.path.read_text().splitlines()]
    assert len(logged) == count


@pytest.mark.ci
def test_it_applies_if_it_is_asked_to(tmp_path):
    made, told = model(), LigerRegistryCallback(apply=True, say=lambda text: None)
    run(tmp_path, made, told)
    (handle,) = told.applied
    assert handle.report.applied("swiglu")
    handle.revert()
    assert "forward" not in made.model.norm.__dict__


def told_of(callback, made, state=None, **arguments):
    """The two events of a run, without one."""
    args = SimpleNamespace(per_device_train_batch_size=2, bf16=False, fp16=False, **arguments)
    state = state or SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(args, state, None, model=made)
    callback.on_train_end(args, state, None, model=made)


def test_nothing_applied_and_nothing_missed():
    said = []
    told_of(LigerRegistryCallback(say=said.append), nn.Linear(2, 2))
    assert "nothing was applied" in said[0]
    assert "no problem of this run" in said[1]


def test_other_processes_are_silent_and_nothing_is_measured_unasked(monkeypatch):
    monkeypatch.setattr(registry, "tune", lambda *args, **kwargs: pytest.fail("measured"))
    told = LigerRegistryCallback(say=lambda text: pytest.fail(text))
    told_of(told, nn.Linear(2, 2), SimpleNamespace(is_world_process_zero=False))


def fake_tuner(monkeypatch):
    seen = []

    def tune(problems, device, **options):
        seen.append((list(problems), device, options))
        return TuneReport(tuple(Row(problem, "tuned") for problem in problems), 0.1, device.fingerprint)

    monkeypatch.setattr(registry, "tune", tune)
    return seen


def test_it_warms_up_what_the_model_poses(monkeypatch):
    seen, said = fake_tuner(monkeypatch), []
    told_of(LigerRegistryCallback(warmup=True, seq=8, budget_s=5.0, say=said.append), model())
    ((problems, device, options),) = seen
    assert device == CPU
    assert options == {"budget_s": 5.0}
    norms = [p for p in problems if p.op == "rms_norm"]
    assert {(p.dims["rows"], p.dims["hidden"], p.dtypes["x"]) for p in norms} == {(16, 32, "float32")}
    assert {p.op for p in problems} >= {"rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"}
    assert f"warmed up on {CPU.fingerprint}: {len(problems)} tuned" in said[1]


def test_the_length_is_the_trainers_and_the_dtype_that_of_mixed_precision(monkeypatch):
    seen = fake_tuner(monkeypatch)
    made = model()
    told = LigerRegistryCallback(warmup=True, say=lambda text: None)
    args = SimpleNamespace(per_device_train_batch_size=2, bf16=True, max_length=16)
    told.on_train_begin(args, None, None, model=made)
    assert {p.dims["rows"] for p in seen[0][0] if p.op == "rms_norm"} == {32}
    assert {p.dtypes["x"] for p in seen[0][0] if p.op == "rms_norm"} == {"bfloat16"}
    # Without a length, what was missed before alone.
    seen.clear()
    x = torch.randn(4, 16)
    registry.get("rms_norm")(x, torch.ones(16))
    told.on_train_begin(SimpleNamespace(per_device_train_batch_size=2, max_length=None), None, None, model=made)
    (problem,) = seen[0][0]
    assert (problem.op, problem.dims["hidden"]) == ("rms_norm", 16)


def test_a_busy_device_does_not_end_the_run(monkeypatch):
    def tune(*args, **options):
        raise TuningBusyError("another tuner")

    said = []
    monkeypatch.setattr(registry, "tune", tune)
    told_of(LigerRegistryCallback(warmup=True, seq=8, say=said.append), model())
    assert "not warmed up: another tuner" in said[1]


def test_the_ranks_of_a_job_share_what_any_of_them_missed(monkeypatch):
    for width in (16, 24):
        registry.get("rms_norm")(torch.randn(4, width), torch.ones(width))
    ours, theirs = callback.missed(registry, CPU)
    seen = []

    def gather(found, problems):
        found[:] = [problems, [theirs, *problems]]

    def tune_sharded(problems, **options):
        seen.append((list(problems), options["budget_s"]))
        return TuneReport((Row(ours, "tuned"),), 0.1, CPU.fingerprint)

    monkeypatch.setattr(callback.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(callback.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(callback.dist, "all_gather_object", gather)
    monkeypatch.setattr(distributed, "tune_sharded", tune_sharded)
    rows = callback._tuned([ours], CPU, 5.0)
    assert [row.problem for row in rows] == [ours]
    assert seen == [([ours, theirs], 5.0)]


def test_what_another_device_missed_is_not_ours():
    registry.get("rms_norm")(torch.randn(4, 16), torch.ones(16))
    (problem,) = callback.missed(registry, CPU)
    registry.misses.clear()
    registry.misses.add("cuda/sm_90/h200-132", problem)
    assert callback.missed(registry, CPU) == []


@pytest.mark.slow
def test_a_warmup_of_what_a_run_missed_leaves_nothing_to_miss(tmp_path):
    made, said = nn.Linear(2, 2), []
    x, weight = torch.randn(4, 16), torch.ones(16)
    registry.get("rms_norm")(x, weight)
    assert len(callback.missed(registry, CPU)) == 1
    told_of(LigerRegistryCallback(warmup=True, say=said.append), made)
    assert "1 default" in said[1] or "1 tuned" in said[1] or "1 noisy" in said[1]
    assert "no problem of this run" in said[2]
    assert callback.missed(registry, CPU) == []
