"""Ranks of ``scale`` over gloo: they train as the plain model does, and what is planted in them is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import scale, scale_group, scale_rank

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("Tried to allocate 1.00 GiB."), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("memory"), False),
    ],
)
def test_what_says_that_memory_was_short(error, short):
    assert scale_rank.out_of_memory(error) is short


def planted(monkeypatch, what):
    monkeypatch.setattr(scale_group, "COMMAND", (sys.executable, str(Path(__file__).parent / "planted_rank.py")))
    monkeypatch.setenv("PLANTED", what)


@pytest.mark.dist
@pytest.mark.ci
def test_two_ranks_train_alike_and_one_that_is_short_of_memory_poisons_nothing(tmp_path, monkeypatch):
    planted(monkeypatch, "short")
    document = scale.run(CPU, tmp_path, modes=("hf", "ours"), caps=(0,), scale="tiny", steps=2, say=print)
    check = document["checks"]["2"]
    assert check["wrong"] == []
    assert all(count > 0 for count in check["measured"])
    assert len(check["digests"]) == 2
    # Weights were learnt: the same tokens' loss is another one after each step.
    assert len(set(check["float32"]["ours"]["losses"])) == scale_rank.CHECK_STEPS
    hf, ours = (document["rows"][0]["modes"][mode] for mode in ("hf", "ours"))
    assert hf["32"]["oom"].startswith("OutOfMemoryError: CUDA out of memory")
    assert ours["32"]["tokens_s"] == pytest.approx(2 * 32 / ours["32"]["ms"] * 1e3)
    assert ours["16"]["losses"] == pytest.approx(hf["16"]["losses"], rel=1e-2)
    assert "fused_linear_cross_entropy x 1" in ours["16"]["applied"]
    assert ours["16"]["logits"] == {}
    monkeypatch.setattr(scale_group, "COMMAND", ("false",))
    again = scale.run(CPU, tmp_path, modes=("hf", "ours"), caps=(0,), scale="tiny", steps=2, say=print)
    assert again["rows"] == json.loads((tmp_path / scale.FILE).read_text())["rows"]


@pytest.mark.dist
@pytest.mark.ci
def test_a_wrong_operation_is_found_before_anything_is_measured(tmp_path, monkeypatch):
    planted(monkeypatch, "wrong")
    document = scale.run(CPU, tmp_path, modes=("ours",), caps=(0,), scale="tiny", say=print)
    assert any(line.startswith("float32: ") for line in document["checks"]["2"]["wrong"])
    assert document["rows"][0]["modes"] == {"ours": {}}
