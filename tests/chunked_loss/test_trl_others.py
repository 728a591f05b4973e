"""Side by side with TRL's own formulas, which the trainers' methods compute of the same model: all but DPO.

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

from liger_registry.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_registry.chunked_loss.grpo import CLIPPED, LEVELS
from liger_registry.chunked_loss.grpo import LOSS_TYPES as POLICIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11"),
    pytest.mark.filterwarnings("ignore"),
]


# -- CPO, SimPO, ORPO --------------------------------------------------------------------------------------------------


def parts(trainer_class, m, average):
    """Scores of both halves by TRL's own function, and the likelihood."""
    ids, mask = shifted(m)
    logits = p.logits_of(m.hidden, m.weight, m.bias)
    logits = torch.cat([logits, logits[:, :1]], 1)  # the last position's are left out
    labels = torch.where(mask == 1, ids, p.IGNORED)
    scores = trainer_class.get_batch_logps(logits, labels, average_log_prob=average)
    half = m.target.shape[0] // 2
    nll = torch.nn.functional.cross_entropy(logits[:half, :-1].flatten(0, 1), labels[:half, 1:].flatten())
    return scores[:half], scores[half:], nll


@pytest.mark.parametrize(
    ("kind", "alpha"),
    [("simpo", 0.0), *((kind, alpha) for kind in ("sigmoid", "hinge", "ipo") for alpha in (0.0, 0.05))],
)
def test_cpo_and_simpo(trl, kind, alpha):
    m, e = p.model(), 0.1 if kind in ("sigmoid", "simpo") else 0.0
    stand_in = SimpleNamespace(
        alpha=alpha, accelerator=Accelerator(), loss_type=kind, simpo_gamma=0.5, beta=0.3, label_smoothing=e
    )
    chosen, rejected, nll = parts(trl.CPOTrainer, m, kind in ("ipo", "simpo"))
    losses, chosen_rewards, rejected_rewards = trl.CPOTrainer.cpo_loss(stand_in, chosen, rejected)
    if kind == "simpo":
        face = LigerFusedLinearSimPOLoss(beta=0.3, label_smoothing=e)
    else:
        face = LigerFusedLinearCPOLoss(beta=0.3, label_smoothing=e, loss_type=kind, reward_alpha=alpha)
    loss, metrics = face(m.weight, m.hidden, m.target, m.bias)
    same(loss, losses.mean() + 1.0 * nll, m)
    torch.testing.assert_close(metrics[0], chosen.detach(), rtol=1e-5, atol=1e-5)
    if not alpha:
        torch.testing.assert_close(metrics[5:], (chosen_rewards, rejected_rewards), rtol=1e-5, atol=1e-5)


def test_orpo(trl):
    m = p.model()
    stand_in = SimpleNamespace(beta=0.1, accelerator=Accelerator())
    chosen, rejected, nll = parts(trl.ORPOTrainer, m, True)
    losses, *rest = trl.ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)
    loss, metrics = LigerFusedLinearORPOLoss()(m.weight, m.hidden, m.target, m.bias)
    same(loss, nll - losses.mean(), m)
    for mine, theirs in zip(metrics[5:], rest, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


# -- KTO ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.7)])
def test_kto(trl, monkeypatch, kind, weights):
    module = sys.modules[trl.KTOTrainer.__module__]
    monkeypatch.setattr(module, "is_peft_model", lambda model: False)
    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *args: nullcontext())
    m = p.model()
    ids, mask = shifted(m)
    wanted = torch.tensor([True, False, True, True, False, False])
    stand_in = trainer(
        m,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=kind == "kto",
        precompute_ref_logps=False,
        beta=0.1,
        loss_type=kind,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )
    kl = torch.tensor([1.5, 2.0, -0.2, 0.0, 0.3, 0.4])
    told = iter([kl, torch.zeros(6)])
    stand_in._compute_kl_logps = lambda model, batch: next(told) if kind == "kto" else None
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask, "label": wanted}
    theirs = trl.KTOTrainer._compute_loss(stand_in, stand_in.model, inputs, False)
    loss, metrics = LigerFusedLinearKTOLoss(
        use_ref_model=True, loss_type=kind, desirable_weight=weights[0], undesirable_weight=weights[1]
    )(
        m.hidden,
        m.weight,
        m.target,
        m.bias,
        wanted,
        m.ref_hidden,
        m.ref_weight,
        m.ref_bias,
        kl.mean() if kind == "kto" else None,
    )
    same(loss, theirs, m)
    logged = stand_in._metrics["train"]
    assert metrics[4].item() / 3 == pytest.approx(logged["rewards/chosen"][0], rel=1e-4)
    assert metrics[5].item() / 3 == pytest.approx(logged["rewards/rejected"][0], rel=1e-4)


# -- GRPO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "level"), [(k, level) for k in POLICIES for level in LEVELS if level == "token" or k in CLIPPED]
)
@pytest.mark.parametrize("full", [False, True])
def test_grpo(trl, kind, level, full):
    m = p.model()
    generator = torch.Generator().manual_seed(3)
    now = p.logps(m.hidden, m.weight, m.bias, m.target)
    mask = (m.target != p.IGNORED).long()
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
    advantages = torch.randn(6, generator=generator)
    old = now.detach() + 0.3 * torch.randn(now.shape, generator=generator) if full else None
    # TRL sums the logarithms of padding's ratios too, which are 1.
    ratio = torch.where(mask == 1, 1 + 0.2 * torch.rand(now.shape, generator=generator), 1.0) if full else None
    beta = 0.05 if full else 0.0
    args = trl.GRPOConfig.__dataclass_fields__
    args = SimpleNamespace(**{name: args[name].default for name in args if "vespo" in name or "sapo" in name})
    args.delta, args.use_bias_correction_kl, args.steps_per_generation = None, True, 1
    high = 1.2 if kind == "cispo" else 0.2
    stand_in = trainer(
        m,
        args=args,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=high,
        use_vllm=full,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=12,
        _entropy_bonus_enabled=False,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **told: (now, torch.zeros_like(now), None),
    )
    empty = torch.zeros(6, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": m.target.clamp(min=0),
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        **(
            {"old_per_token_logps": old, "ref_per_token_logps": refs, "importance_sampling_ratio": ratio}
            if full
            else {}
        ),
    }
    theirs = trl.GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)
    face = LigerFusedLinearGRPOLoss(
        beta=beta,
        use_ref_model=full,
        loss_type=kind,
        importance_sampling_level=level,
        max_completion_length=12 if kind == "dr_grpo" else None,
        epsilon_high=high,
        use_bias_correction_kl=True,
    )
    told = (m.bias, refs if full else None, old, None, None, None, ratio)
    loss, metrics = face(m.hidden, m.weight, m.target.clamp(min=0), mask, advantages, *told)
    same(loss, theirs, m)
    logged = stand_in._metrics["train"]
    if full:
        assert metrics[0].item() == pytest.approx(logged["kl"][0], rel=1e-4)
    if level == "token" and kind in CLIPPED:
        assert metrics[-1].item() == pytest.approx(logged["clip_ratio/region_mean"][0], rel=1e-5)
