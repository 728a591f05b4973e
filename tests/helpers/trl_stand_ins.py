"""TRL's own loss functions on stand-ins for the trainer and the model, so that nothing is trained or downloaded."""

from __future__ import annotations

import importlib
import warnings
from collections import defaultdict
from types import SimpleNamespace

import preference as p
import pytest
import torch

NAMES = {
    "trl.experimental.cpo.cpo_config": "CPOConfig",
    "trl.experimental.cpo.cpo_trainer": "CPOTrainer",
    "trl.experimental.orpo.orpo_config": "ORPOConfig",
    "trl.experimental.orpo.orpo_trainer": "ORPOTrainer",
    "trl.trainer.dpo_config": "DPOConfig",
    "trl.trainer.dpo_trainer": "DPOTrainer",
    "trl.trainer.grpo_config": "GRPOConfig",
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.kto_config": "KTOConfig",
    "trl.trainer.kto_trainer": "KTOTrainer",
}


@pytest.fixture(scope="module", name="trl")
def trl_fixture():
    """TRL's trainers and configs, whose imports warn of what other packages deprecate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SimpleNamespace(**{name: getattr(importlib.import_module(m), name) for m, name in NAMES.items()})


class Accelerator:
    device = torch.device("cpu")
    num_processes = 1

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction):
        return tensor


def shifted(m):
    """Token ids and the mask of completions as trainers have them, one position longer than targets."""
    first = torch.zeros(m.target.shape[0], 1, dtype=torch.long)
    ids = torch.cat([first, m.target.clamp(min=0)], 1)
    return ids, torch.cat([first, (m.target != p.IGNORED).long()], 1)


def model_of(hidden, weight, bias):
    """What TRL's patched models return of labels: log-probabilities and more of each token."""

    def forward(labels=None, **told):
        target = torch.where(labels[:, 1:] == p.IGNORED, p.IGNORED, labels[:, 1:])
        z = p.logits_of(hidden, weight, bias)
        probabilities = z.softmax(-1)
        return SimpleNamespace(
            log_probs=p.logps(hidden, weight, bias, target),
            log_sum_sq_probs=probabilities.square().sum(-1).log(),
            entropy=-(probabilities * z.log_softmax(-1)).sum(-1),
            mean_logits=z.mean(-1),
            is_top1=z.argmax(-1) == target,
        )

    return forward


def trainer(m, **told):
    policy = model_of(m.hidden, m.weight, m.bias)
    policy.training = True
    return SimpleNamespace(
        model=policy,
        ref_model=model_of(m.ref_hidden, m.ref_weight, m.ref_bias),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **told,
    )


def same(mine, theirs, m, rtol=2e-4):
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-5)
    grads = [torch.autograd.grad(x, p.leaves(m)) for x in (mine, theirs)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max().item() <= rtol * b.abs().max().item() + 1e-6
