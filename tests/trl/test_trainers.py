"""Trainers of TRL with their fused heads served: what they log and what they learn stays the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL needs Python 3.11")
from trl_runs import KINDS, trained, trainer

from liger_registry.transformers import _handles, apply, apply_to_trl

FIELDS = {
    "sft": {"loss", "entropy", "mean_token_accuracy", "grad_norm"},
    "dpo": {"loss", "entropy", "logits/chosen", "logps/chosen", "rewards/margins", "mean_token_accuracy"},
    "kto": {"loss", "entropy", "logits/chosen", "logps/chosen", "rewards/chosen", "kl"},
    "grpo": {"loss", "entropy", "kl", "reward"},
    "rloo": {"loss", "entropy", "kl", "reward"},
}


def tiered(kind, peft):
    return pytest.param(kind, peft, marks=pytest.mark.ci if kind == "sft" else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "peft"), [tiered(kind, peft) for kind in KINDS for peft in (False, True)])
def test_what_is_logged_and_learned_is_the_same(kind, peft, tmp_path, monkeypatch):
    plain = trainer(kind, tmp_path / "plain", peft=peft)
    logged = trained(plain)
    assert FIELDS[kind] <= set().union(*logged)
    served = trainer(kind, tmp_path / "served", peft=peft)
    applied = apply(served.model, fused_linear_cross_entropy=False)
    handle = apply_to_trl(served)
    heads = {row.module.split(".")[0] for row in handle.report.applied("linear_logp")}
    assert heads == ({"model"} if peft or kind == "sft" else {"model", "ref_model"})
    assert not handle.report.skipped()
    assert len(applied.report.applied("swiglu")) == 2
    seen = []

    class Handles(dict):
        def get(self, op):
            seen.append(op)
            return super().get(op)

    monkeypatch.setattr(_handles, "_handles", Handles())
    found = trained(served)
    assert seen.count("linear_logp") >= 2
    assert seen.count("rms_norm") + seen.count("fused_add_rms_norm") >= 2
    assert len(found) == len(logged) >= 3
    for mine, theirs in zip(found, logged, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name
    parameters = [dict(made.model.named_parameters()) for made in (plain, served)]
    assert parameters[0].keys() == parameters[1].keys()
    for name, theirs in parameters[0].items():
        torch.testing.assert_close(parameters[1][name], theirs, rtol=1e-2, atol=2e-3)
    handle.revert()
    applied.revert()
