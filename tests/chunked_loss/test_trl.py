"""Side by side with TRL's own formulas, which the trainers' methods compute of the same model: DPO, and every default.

TRL needs Python 3.11.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import preference as p
import pytest
import torch
from trl_stand_ins import Accelerator, same, shifted, trainer, trl_fixture  # noqa: F401

from liger_registry.chunked_loss import LigerFusedLinearDPOLoss, Pairs
from liger_registry.chunked_loss.dpo import BY_DIFFERENCE, LOSS_TYPES, SEPARABLE, SMOOTHED
from liger_registry.chunked_loss.dpo import dpo as formula
from liger_registry.chunked_loss.grpo import Policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11"),
    pytest.mark.filterwarnings("ignore"),
]


def dpo(trl, m, monkeypatch, **told):
    monkeypatch.setattr(sys.modules[trl.DPOTrainer.__module__], "is_peft_model", lambda model: False)
    name = "disable_gradient_checkpointing"
    monkeypatch.setattr(sys.modules[trl.DPOTrainer.__module__], name, lambda *args: nullcontext())
    defaults = {
        "loss_types": ["sigmoid"],
        "loss_weights": None,
        "ld_alpha": None,
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "beta": 0.1,
        "label_smoothing": 0.0,
        "use_weighting": False,
    }
    settings = {**defaults, **told}
    settings["loss_weights"] = settings["loss_weights"] or [1.0] * len(settings["loss_types"])
    args = SimpleNamespace(discopop_tau=settings.pop("discopop_tau", 0.05), gradient_checkpointing_kwargs=None)
    ids, mask = shifted(m)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    stand_in = trainer(m, args=args, **settings)
    loss = trl.DPOTrainer._compute_loss(stand_in, stand_in.model, inputs, False)
    return loss, stand_in._metrics["train"]


def ours(m, **told):
    return LigerFusedLinearDPOLoss(**told)(m.weight, m.hidden, m.target, m.bias, m.ref_hidden, m.ref_weight, m.ref_bias)


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_dpo(trl, monkeypatch, kind):
    m, e = p.model(size=0.2), 0.1 if kind in SMOOTHED else 0.0
    loss, metrics = ours(m, loss_type=kind, label_smoothing=e)
    theirs, logged = dpo(trl, m, monkeypatch, loss_types=[kind], label_smoothing=e)
    same(loss, theirs, m)
    assert metrics[0].mean().item() == pytest.approx(logged["logps/chosen"][0], rel=1e-5)
    assert metrics[1].mean().item() == pytest.approx(logged["logps/rejected"][0], rel=1e-5)
    assert metrics[5].mean().item() == pytest.approx(logged["rewards/chosen"][0], rel=1e-4, abs=1e-5)
    assert metrics[6].mean().item() == pytest.approx(logged["rewards/rejected"][0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", BY_DIFFERENCE)
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_f_divergences(trl, monkeypatch, kind, divergence):
    m, e = p.model(size=0.1), 0.1 if kind in SMOOTHED else 0.0
    told = {"f_divergence_type": divergence}
    told |= {"f_alpha_divergence_coef": 0.7} if divergence == "alpha_divergence" else {}
    theirs, _ = dpo(trl, m, monkeypatch, loss_types=[kind], label_smoothing=e, **told)
    same(ours(m, loss_type=kind, label_smoothing=e, **told)[0], theirs, m)


@pytest.mark.parametrize(
    "told",
    [
        {"ld_alpha": 0.3},
        {"use_weighting": True},
        {"beta": 0.5},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["sft"]},
        {"loss_type": ["discopop"], "discopop_tau": 0.5},
    ],
    ids=str,
)
def test_dpo_options(trl, monkeypatch, told):
    m = p.model(size=0.2)
    names = {"loss_type": "loss_types"}
    theirs, _ = dpo(trl, m, monkeypatch, **{names.get(k, k): v for k, v in told.items()})
    same(ours(m, **told)[0], theirs, m)


@pytest.mark.parametrize("kind", SEPARABLE)
def test_a_pair_without_tokens(trl, monkeypatch, kind):
    """TRL adds the loss of equal models to the mean, which no gradient flows through; here it is 0."""
    m, e = p.model(size=0.2), 0.1 if kind in SMOOTHED else 0.0
    m.target[[1, 4]] = p.IGNORED
    loss, _ = ours(m, loss_type=kind, label_smoothing=e)
    theirs, _ = dpo(trl, m, monkeypatch, loss_types=[kind], label_smoothing=e)
    nothing = Pairs(*torch.zeros(6, 1))
    constant = formula(nothing, loss_type=kind, label_smoothing=e)[0].item() / 3
    assert constant != 0 or kind == "exo_pair"
    same(loss, theirs - constant, m)


def test_defaults_are_its_configs(trl):
    """What ``test_faces`` has written down."""

    def default(config, name):
        field = config.__dataclass_fields__[name]
        return field.default_factory() if callable(field.default_factory) else field.default

    known = {
        trl.DPOConfig: {
            "loss_type": ["sigmoid"],
            "loss_weights": None,
            "beta": 0.1,
            "label_smoothing": 0.0,
            "discopop_tau": 0.05,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "ld_alpha": None,
            "use_weighting": False,
        },
        trl.CPOConfig: {
            "beta": 0.1,
            "label_smoothing": 0.0,
            "loss_type": "sigmoid",
            "cpo_alpha": 1.0,
            "simpo_gamma": 0.5,
            "alpha": 0.0,
        },
        trl.ORPOConfig: {"beta": 0.1},
        trl.KTOConfig: {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "loss_type": "kto"},
        trl.GRPOConfig: {
            "epsilon": Policy().epsilon_low,
            "epsilon_high": None,
            "temperature": 1.0,
            **{
                name: getattr(Policy(), name)
                for name in Policy.__dataclass_fields__
                if name not in ("epsilon_low", "epsilon_high")
            },
        },
    }
    for config, values in known.items():
        for name, value in values.items():
            assert default(config, name) == value, (config, name)
