"""A Kestrel model with the adapter installed: the same numbers, through the operations."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from liger_registry.transformers import apply

KESTREL = Path(__file__).parents[1] / "kestrel"


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(KESTREL, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def batch():
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def losses(model, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_what_is_applied(model):
    report = apply(model).report
    norms = [name for name, part in model.named_modules() if type(part).__name__ == "KestrelNorm"]
    assert [row.module for row in report.applied("rms_norm")] == norms
    assert [row.module for row in report.applied("swiglu")] == ["layers.0.mlp", "layers.1.mlp"]
    assert [row.module for row in report.applied("fused_linear_cross_entropy")] == ["", "head"]


def test_it_trains_the_same_without_logits(model):
    plain = copy.deepcopy(model)
    handle = apply(model)
    assert losses(model) == pytest.approx(losses(plain), rel=1e-5)
    assert not handle.report.materialised
    handle.revert()
    assert torch.equal(model(**batch()).logits, model(**batch()).logits)
    assert "forward" not in vars(model.last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_as_the_model_does(model, dtype):
    model.to(dtype)
    expected = model.last(torch.randn(2, 5, 64).to(dtype).fill_(0.3))
    with apply(model):
        assert torch.equal(model.last(torch.full((2, 5, 64), 0.3, dtype=dtype)), expected)


def test_copies_and_pickles(model):
    apply(model)
    expected = model(**batch()).loss
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(**batch()).loss, expected)
        assert made.last.forward.__self__.module is made.last


def test_a_norm_that_changed_is_left_alone(model, monkeypatch):
    kind = type(model.last)
    monkeypatch.setattr(kind, "forward", lambda self, x: x * self.weight)
    report = apply(model).report
    assert not report.applied("rms_norm")
    assert "the norm of this Kestrel computes something else" in {row.reason for row in report.skipped("rms_norm")}
