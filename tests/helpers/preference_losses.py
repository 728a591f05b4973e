"""Every preference and policy loss as a function of a model of ``preference``, for tests of what holds for all."""

from __future__ import annotations

import preference as p
import pytest
import torch

from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)


def paired(kind, **told):
    def run(m, head=Head(), **others):  # noqa: B008 - it is frozen
        return kind(**told, head=head)(m.weight, m.hidden, m.target, m.bias, **others)

    return run


def against_reference(kind=LigerFusedLinearDPOLoss, **told):
    def run(m, head=Head()):  # noqa: B008
        loss = kind(**told, head=head)
        return loss(m.weight, m.hidden, m.target, m.bias, m.ref_hidden, m.ref_weight, m.ref_bias)

    return run


def kto(m, head=Head()):  # noqa: B008
    loss = LigerFusedLinearKTOLoss(use_ref_model=True, head=head)
    labels = torch.arange(m.target.shape[0], device=m.target.device) % 3 != 1
    return loss(m.hidden, m.weight, m.target, m.bias, labels, m.ref_hidden, m.ref_weight, m.ref_bias)


def grpo(m, head=Head(), **told):  # noqa: B008
    loss = LigerFusedLinearGRPOLoss(beta=0.1, head=head, **told)
    advantages = torch.linspace(-1, 1, m.target.shape[0], device=m.target.device)
    mask = (m.target != p.IGNORED).long()
    ids = torch.where(m.target == p.IGNORED, 3, m.target)
    more = (None, None, m.ref_hidden, m.ref_weight, m.ref_bias)
    return loss(m.hidden, m.weight, ids, mask, advantages, m.bias, *more)


LOSSES = {
    "dpo": against_reference(),
    "dpo-nll": against_reference(compute_nll_loss=True, average_log_prob=True),
    "aot": against_reference(loss_type="aot"),
    "orpo": paired(LigerFusedLinearORPOLoss),
    "cpo": paired(LigerFusedLinearCPOLoss),
    "simpo": paired(LigerFusedLinearSimPOLoss),
    "kto": kto,
    "grpo": grpo,
    "gspo": lambda m, **told: grpo(m, importance_sampling_level="sequence", **told),
}
#: Of the first tier; one in pairs with and one without a likelihood, and one of tokens.
FIRST = ("dpo", "orpo", "grpo")
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.ci) for name in LOSSES]
)


def numbers(run, m, **told):
    """Loss, metrics and gradients."""
    loss, metrics = run(m, **told)
    return [loss.detach(), *metrics, *torch.autograd.grad(loss, p.leaves(m))]
