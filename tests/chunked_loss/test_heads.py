"""Dtypes, autocast, caps, scales, tied and frozen heads, heads with adapters: right, or refused by name."""

from __future__ import annotations

import copy
import math
import pickle

import preference as p
import pytest
import torch
from peft import LoraConfig, get_peft_model
from preference_losses import EVERY, LOSSES, grpo, numbers
from torch import nn

from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
)
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError

HEADS = [{"softcap": 3.0}, {"logit_scale": 0.3}, {"softcap": 2.0, "temperature": 0.6}]


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(name, dtype):
    m = p.model(dtype=dtype)
    truth, mine = numbers(LOSSES[name], p.wide(m)), numbers(LOSSES[name], m)
    for a, b in zip(mine[-3:], truth[-3:], strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).norm() / b.norm()).item() < 5e-2
    torch.testing.assert_close(mine[0].double(), truth[0], rtol=5e-2, atol=5e-3)


@EVERY
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(name, cast):
    m = p.model()
    truth = numbers(LOSSES[name], p.wide(m))
    with torch.autocast("cpu", cast):
        loss, _ = LOSSES[name](m)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth[0], rtol=5e-2, atol=5e-3)
    for a, b in zip(torch.autograd.grad(loss, p.leaves(m)), truth[-3:], strict=True):
        assert a.dtype == torch.float32
        assert ((a.double() - b).norm() / b.norm()).item() < 5e-2


def test_dtypes_that_do_not_go_together_are_refused():
    m = p.model()
    m.weight = m.weight.detach().bfloat16().requires_grad_()
    with pytest.raises(UnsupportedDtypeError):
        LOSSES["dpo"](m)


@pytest.mark.parametrize(
    "head", [{"softcap": 3.0}, {"logit_scale": 0.3}, {"softcap": 2.0, "temperature": 0.6}], ids=str
)
def test_caps_scales_and_temperatures(head):
    m = p.model()

    def right(m):
        c, r = p.logps(m.hidden, m.weight, m.bias, m.target, **head).sum(-1).chunk(2)
        rc, rr = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target, **head).sum(-1).chunk(2)
        x = 0.1 * (c - r - rc + rr)
        return torch.log1p(torch.exp(-x)).mean(), (
            c,
            r,
            *p.half_means(m),
            x.new_zeros(()),
            0.1 * (c - rc),
            0.1 * (r - rr),
        )

    p.compare(lambda m: LOSSES["dpo"](m, head=Head(**head)), right, m)
    logp = p.logps(m.hidden, m.weight, m.bias, m.target, **head)
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target, **head)
    q = (refs - logp)[m.target != p.IGNORED]
    _, (divergence, _) = grpo(m, head=Head(**head))
    torch.testing.assert_close(divergence, (q.exp() - q - 1).mean().detach())


def test_a_head_tied_to_its_embedding():
    """The weight gets the gradients of both of its uses."""
    weight = torch.randn(37, 16, requires_grad=True)
    m = p.model(bias=False)
    ids = m.target.clamp(min=0)
    loss, _ = LigerFusedLinearCPOLoss()(weight, weight[ids], m.target)
    exact = weight.detach().double().requires_grad_()
    tokens = p.logps(exact[ids], exact, None, m.target)
    c, r = tokens.sum(-1).chunk(2)
    right = torch.log1p(torch.exp(-0.1 * (c - r))).mean() + p.nll(tokens, m.target)
    torch.testing.assert_close(loss.double(), right)
    (mine,), (other,) = torch.autograd.grad(loss, weight), torch.autograd.grad(right, exact)
    torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize("needed", ["hidden", "weight", "bias", "none"])
def test_frozen_parts_get_no_gradient(name, needed):
    m = p.model()
    right = dict(zip(("hidden", "weight", "bias"), numbers(LOSSES[name], m)[-3:], strict=True))
    for part in ("hidden", "weight", "bias"):
        getattr(m, part).requires_grad_(part == needed)
    loss, _ = LOSSES[name](m)
    if needed == "none":
        assert not loss.requires_grad
        return
    (mine,) = torch.autograd.grad(loss, p.leaves(m))
    torch.testing.assert_close(mine, right[needed], rtol=1e-5, atol=1e-6)


def test_nobodys_memory_is_written_and_backward_runs_twice():
    m = p.model()
    before = {name: t.detach().clone() for name, t in vars(m).items() if torch.is_tensor(t)}
    loss, _ = LOSSES["orpo"](m)
    grads = [torch.autograd.grad(loss, p.leaves(m), torch.tensor(2.0), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(torch.equal(before[name], getattr(m, name)) for name in before)


def test_losses_copy_and_pickle():
    for kind in (LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, LigerFusedLinearKTOLoss):
        loss = kind(head=Head(softcap=3.0))
        for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            assert again.head == loss.head
            assert again.beta == loss.beta


# -- heads that are modules --------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.head = nn.Linear(16, 37, bias=bias)


def adapted(bias=False, **told):
    model = get_peft_model(Model(bias), LoraConfig(r=3, lora_alpha=5, target_modules=["head"], **told))
    layer = model.base_model.model.head
    for name in layer.lora_B:
        nn.init.normal_(layer.lora_B[name].weight)
    return model, layer


def test_a_plain_head():
    m = p.model()
    head = nn.Linear(16, 37)
    with torch.no_grad():
        head.weight.copy_(m.weight)
        head.bias.copy_(m.bias)
    loss, metrics = LigerFusedLinearCPOLoss()(head, m.hidden, m.target)
    other, others = LOSSES["cpo"](m)
    assert loss == other
    assert all(torch.equal(a, b) for a, b in zip(metrics, others, strict=True))
    loss.backward()
    right = torch.autograd.grad(other, (m.weight, m.bias))
    torch.testing.assert_close([head.weight.grad, head.bias.grad], list(right))
    with pytest.raises(InvalidInputError, match="bias"):
        LigerFusedLinearCPOLoss()(head, m.hidden, m.target, m.bias)


@pytest.mark.parametrize("told", [{}, {"bias": True}, {"lora_bias": True, "bias": True}], ids=str)
def test_an_adapter_of_the_head_is_part_of_it(told):
    """Loss and gradients are those of what the layer itself computes; its ``weight`` would leave the adapter out."""
    bias = told.get("bias", False)
    model, layer = adapted(bias, lora_bias=told.get("lora_bias", False))
    m = p.model()
    loss, metrics = LigerFusedLinearCPOLoss()(layer, m.hidden, m.target)
    logp = torch.log_softmax(layer(m.hidden), -1).gather(-1, m.target.clamp(min=0)[..., None]).squeeze(-1)
    logp = torch.where(m.target == p.IGNORED, 0.0, logp)
    c, r = logp.sum(-1).chunk(2)
    right = torch.log1p(torch.exp(-0.1 * (c - r))).mean() + p.nll(logp, m.target)
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics[2], layer(m.hidden)[:3].mean().detach(), rtol=1e-4, atol=1e-5)
    trained = [t for t in model.parameters() if t.requires_grad]
    assert len(trained) == 2 + told.get("lora_bias", False)
    mine, others = (torch.autograd.grad(x, (*trained, m.hidden)) for x in (loss, right))
    torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5)
    bare, _ = LigerFusedLinearCPOLoss()(layer.weight, m.hidden, m.target, layer.base_layer.bias)
    assert not torch.isclose(bare, loss)


def test_a_young_adapter_is_not_rounded_away():
    """It adds 3e-4 to weights of 0.5, of which half an ulp is 2e-3 in bf16."""
    model, layer = adapted()
    model.bfloat16()
    signs = torch.ones(16, dtype=torch.bfloat16)
    signs[::2] = -1.0
    hidden = signs.repeat(2, 5, 1)  # whose product with equal weights is 0
    with torch.no_grad():
        layer.base_layer.weight.fill_(0.5)
        layer.lora_A["default"].weight.copy_(signs * 2.0**-4)
        layer.lora_B["default"].weight.zero_()[3] = 2.0**-10
    _, metrics = LigerFusedLinearCPOLoss()(layer, hidden, torch.full((2, 5), 3))
    logits = torch.zeros(37, dtype=torch.float64)
    logits[3] = 5 * 2.0**-10  # three ranks of 1 times 2^-10, scaled by 5 / 3
    right = 5 * logits.log_softmax(0)[3]
    assert right - 5 * math.log(1 / 37) > 0.02
    for found in metrics[:2]:
        assert found.item() == pytest.approx(right.item(), abs=5e-4)


def test_adapters_that_are_off_or_merged():
    model, layer = adapted()
    m = p.model(bias=False)
    with_adapter, _ = LigerFusedLinearCPOLoss()(layer, m.hidden, m.target)
    with model.disable_adapter():
        without, _ = LigerFusedLinearCPOLoss()(layer, m.hidden, m.target)
    torch.testing.assert_close(without, LigerFusedLinearCPOLoss()(layer.base_layer.weight, m.hidden, m.target)[0])
    assert not torch.isclose(with_adapter, without)
    layer.merge()
    torch.testing.assert_close(LigerFusedLinearCPOLoss()(layer, m.hidden, m.target)[0], with_adapter)


def test_a_copy_of_the_head_for_an_adapter():
    config = LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"])

    class Both(Model):
        def __init__(self):
            super().__init__(False)
            self.body = nn.Linear(16, 16)

    model = get_peft_model(Both(), config)
    wrapper = model.base_model.model.head
    copied = wrapper.modules_to_save["default"]
    with torch.no_grad():
        copied.weight.mul_(2)
    m = p.model(bias=False)
    loss, _ = LigerFusedLinearCPOLoss()(wrapper, m.hidden, m.target)
    torch.testing.assert_close(loss, LigerFusedLinearCPOLoss()(copied.weight, m.hidden, m.target)[0])
    loss.backward()
    assert copied.weight.grad is not None
    with model.disable_adapter():
        original, _ = LigerFusedLinearCPOLoss()(wrapper, m.hidden, m.target)
    torch.testing.assert_close(original, LigerFusedLinearCPOLoss()(copied.weight / 2, m.hidden, m.target)[0])


@pytest.mark.parametrize("told", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_adapters_that_are_no_sum_of_weights_are_refused(told):
    _, layer = adapted(**told)
    m = p.model(bias=False)
    with pytest.raises(UnsupportedOptionError, match="adapter"):
        LigerFusedLinearCPOLoss()(layer, m.hidden, m.target)
    if "lora_dropout" in told:
        LigerFusedLinearCPOLoss()(layer.eval(), m.hidden, m.target)


def test_heads_that_are_not_linear_are_refused():
    m = p.model(bias=False)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for head in (nn.Sequential(nn.Linear(16, 37)), Doubled(16, 37), nn.Embedding(37, 16)):
        with pytest.raises(UnsupportedOptionError, match="head"):
            LigerFusedLinearCPOLoss()(head, m.hidden, m.target)


def test_a_weight_whose_values_are_elsewhere_is_refused():
    m = p.model(bias=False)
    weight = nn.Parameter(torch.empty(0))
    weight.ds_id = 3  # as DeepSpeed's third stage leaves it
    with pytest.raises(InvalidInputError, match="sharded"):
        LigerFusedLinearCPOLoss()(weight, m.hidden, m.target)
    with pytest.raises(InvalidInputError, match="sharded"):
        LigerFusedLinearJSDLoss()(m.hidden, weight, m.ref_hidden, m.ref_weight, m.target)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["softcap", "logit_scale", "temperature"])
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(UnsupportedOptionError, match=name):
        Head(**{name: value})
