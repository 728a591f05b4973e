"""GRPO and its kin against the papers' formulas in float64: every loss type, level and option."""

from __future__ import annotations

import math

import preference as p
import pytest
import torch

from liger_registry.chunked_loss import LigerFusedLinearGRPOLoss
from liger_registry.chunked_loss.grpo import CLIPPED, LEVELS, LOSS_TYPES
from liger_registry.errors import InvalidInputError, UnsupportedOptionError

PAIRS = [(kind, level) for kind in LOSS_TYPES for level in LEVELS if level == "token" or kind in CLIPPED]


def known(m, seed=3, spread=0.4):
    """What a trainer passes beside the model: mask, advantages, old log-probabilities and ratios."""
    generator = torch.Generator().manual_seed(seed)
    now = p.logps(m.hidden, m.weight, m.bias, m.target).detach().float()
    return {
        "mask": (m.target != p.IGNORED).long(),
        "advantages": torch.randn(m.target.shape[0], generator=generator),
        "old": now + spread * torch.randn(now.shape, generator=generator),
        "ratio": 1 + 0.3 * torch.rand(now.shape, generator=generator),
    }


def right(
    m,
    k,
    kind="dapo",
    level="token",
    beta=0.0,
    low=0.2,
    high=0.2,
    delta=None,
    old=None,
    refs=None,
    ratio=None,
    corrected=False,
    longest=None,
    items=None,
    temperature=1.0,
    sapo=(1.0, 1.05),
    vespo=(2.0, 3.0, 3.0, 2.0),
):
    """Loss and metrics, sequence by sequence and token by token."""
    logp = p.logps(m.hidden, m.weight, m.bias, m.target, temperature=temperature)
    mask, advantages = k["mask"], k["advantages"].double()
    count, total = mask.shape[0], mask.sum().item()
    sums, clipped, divergence = [], 0.0, 0.0
    for n in range(count):
        here = mask[n].bool()
        length = max(here.sum().item(), 1)
        now, a = logp[n][here], advantages[n]
        before = now.detach() if old is None else old.double()[n][here]
        difference = now - before
        mean = difference.sum() / length
        w = torch.exp(difference if level == "token" else mean.expand_as(difference))
        if kind == "cispo":
            losses = -torch.clamp(w, max=high).detach() * a * now
            cut = (w > high) & (a > 0)
        elif kind == "sapo":
            t = sapo[0] if a > 0 else sapo[1]
            losses = -4 / t * torch.sigmoid(t * (w - 1)) * a
            cut = torch.zeros_like(w, dtype=torch.bool)
        elif kind == "vespo":
            log_w = difference.detach().clamp(-20, 20).sum()
            if ratio is not None:
                log_w = log_w + (ratio.double()[n][here] if ratio.dim() == 2 else ratio.double()[n]).log().sum()
            log_w = log_w.clamp(math.log(1e-8), 20)
            power, rate = vespo[:2] if a >= 0 else vespo[2:]
            losses = -torch.exp(rate + power * log_w - rate * log_w.exp()) * a * now
            cut = torch.zeros_like(w, dtype=torch.bool)
        else:
            bounded = w if delta is None else w.clamp(max=delta)
            losses = -torch.minimum(bounded * a, w.clamp(1 - low, 1 + high) * a)
            cut = ((w < 1 - low) & (a < 0)) | ((w > 1 + high) & (a > 0))
        if ratio is not None and kind != "vespo":
            losses = losses * (ratio.double()[n][here] if ratio.dim() == 2 else ratio.double()[n])
        if beta:
            q = (now.detach() if refs is None else refs.double()[n][here]) - now
            kl = (torch.exp(q) - q - 1) * (w if corrected else 1)
            losses = losses + beta * kl
            divergence = divergence + kl.sum()
        clipped += cut.sum().item()
        sums.append(losses.sum() / (length if kind in ("grpo", "sapo") else 1))
    divisor = {"bnpo": total, "dr_grpo": count * (longest or 1)}.get(kind, count)
    if kind in ("dapo", "cispo", "vespo"):
        divisor = total if items is None else items
    metrics = [logp.new_tensor(clipped / total)]
    if beta:
        metrics.insert(0, divergence / total)
    return sum(sums) / divisor, metrics


def run(m, k, refs=None, old=None, ratio=None, items=None, **options):
    told = {"use_ref_model": refs is not None, "beta": 0.0, **options}
    if told.get("loss_type") == "dr_grpo":
        told.setdefault("max_completion_length", 12)
    loss = LigerFusedLinearGRPOLoss(**told)
    ids = m.target.clamp(min=0)
    return loss(m.hidden, m.weight, ids, k["mask"], k["advantages"], m.bias, refs, old, None, None, None, ratio, items)


@pytest.mark.parametrize(("kind", "level"), PAIRS)
def test_on_policy(kind, level):
    m = p.model()
    k = known(m)
    p.compare(
        lambda m: run(m, k, loss_type=kind, importance_sampling_level=level),
        lambda m: right(m, k, kind, level, longest=12),
        m,
    )


@pytest.mark.parametrize(("kind", "level"), PAIRS)
def test_with_an_old_policy_a_reference_and_ratios(kind, level):
    m = p.model()
    k = known(m)
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
    told = {"high": 1.1 if kind == "cispo" else 0.2}
    p.compare(
        lambda m: run(
            m,
            k,
            refs,
            k["old"],
            k["ratio"],
            beta=0.3,
            loss_type=kind,
            importance_sampling_level=level,
            use_bias_correction_kl=True,
            epsilon_high=told["high"],
        ),
        lambda m: right(
            m, k, kind, level, 0.3, old=k["old"], refs=refs, ratio=k["ratio"], corrected=True, longest=12, **told
        ),
        m,
        rtol=1e-4,
    )


@pytest.mark.parametrize("kind", ["grpo", "dapo", "luspo"])
@pytest.mark.parametrize("level", LEVELS)
def test_bounds_of_ratios(kind, level):
    m = p.model()
    k = known(m, spread=1.0)
    p.compare(
        lambda m: run(
            m,
            k,
            old=k["old"],
            loss_type=kind,
            importance_sampling_level=level,
            epsilon_low=0.05,
            epsilon_high=0.4,
            delta=1.5,
        ),
        lambda m: right(m, k, kind, level, low=0.05, high=0.4, delta=1.5, old=k["old"]),
        m,
    )


@pytest.mark.parametrize("kind", ["dapo", "vespo", "cispo"])
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_ratios_of_sequences(kind, shape):
    m = p.model()
    k = known(m)
    ratio = torch.linspace(0.5, 1.5, 6)
    p.compare(
        lambda m: run(m, k, old=k["old"], ratio=ratio.view(shape), loss_type=kind),
        lambda m: right(m, k, kind, old=k["old"], ratio=ratio),
        m,
    )


def test_temperatures_and_weights_of_sapo_and_vespo():
    m = p.model()
    k = known(m)
    p.compare(
        lambda m: run(m, k, old=k["old"], loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
        lambda m: right(m, k, "sapo", old=k["old"], sapo=(2.0, 0.5)),
        m,
    )
    names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    values = (1.0, 0.5, 0.25, 1.5)
    p.compare(
        lambda m: run(m, k, old=k["old"], loss_type="vespo", **dict(zip(names, values, strict=True))),
        lambda m: right(m, k, "vespo", old=k["old"], vespo=values),
        m,
    )


@pytest.mark.parametrize("items", [100, 40.0, torch.tensor(250)], ids=str)
@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
def test_the_tokens_of_the_whole_batch(kind, items):
    m = p.model()
    k = known(m)
    p.compare(lambda m: run(m, k, items=items, loss_type=kind), lambda m: right(m, k, kind, items=float(items)), m)


def test_temperature():
    m = p.model()
    k = known(m)
    p.compare(lambda m: run(m, k, temperature=0.7), lambda m: right(m, k, temperature=0.7), m)


def test_a_reference_model():
    m = p.model()
    k = known(m)
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target, temperature=0.8)
    loss = LigerFusedLinearGRPOLoss(beta=0.2, temperature=0.8)
    ids, more = m.target.clamp(min=0), (m.ref_hidden, m.ref_weight, m.ref_bias)
    p.compare(
        lambda m: loss(m.hidden, m.weight, ids, k["mask"], k["advantages"], m.bias, None, None, *more),
        lambda m: right(m, k, beta=0.2, refs=refs, temperature=0.8),
        m,
    )


def test_a_divergence_without_a_reference_is_0():
    m = p.model()
    k = known(m)
    loss, (divergence, _) = run(m, k, beta=0.5)
    assert divergence.item() == 0
    bare, _ = run(m, k)
    torch.testing.assert_close(loss, bare)
    torch.testing.assert_close(torch.autograd.grad(loss, m.hidden), torch.autograd.grad(bare, m.hidden))


def test_advantages_of_tokens():
    m = p.model()
    k = known(m)
    broad = k["advantages"][:, None].expand(6, 7)
    loss = LigerFusedLinearGRPOLoss(use_ref_model=False)
    ids = m.target.clamp(min=0)
    found = [loss(m.hidden, m.weight, ids, k["mask"], a, m.bias)[0] for a in (k["advantages"], broad)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "level"), PAIRS)
def test_tokens_that_do_not_count_have_no_influence(kind, level):
    """Not even where all they have is no number."""
    m = p.model()
    k = known(m)
    none = k["mask"] == 0
    refs = p.logps(m.ref_hidden, m.ref_weight, m.ref_bias, m.target)
    found = []
    for fill in (0.0, math.nan, math.inf):
        broad = k["advantages"][:, None].expand_as(refs)
        old, ref, ratio, each = (t.masked_fill(none, fill) for t in (k["old"], refs, k["ratio"], broad))
        told = {"loss_type": kind, "importance_sampling_level": level, "beta": 0.1, "use_bias_correction_kl": True}
        loss, metrics = run(m, {**k, "advantages": each}, ref, old, ratio, **told)
        found.append([loss.detach(), *metrics, *torch.autograd.grad(loss, p.leaves(m))])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert not found[0][-3][none].any()


def test_far_ratios_stay_finite():
    m = p.model()
    k = known(m)
    for kind in LOSS_TYPES:
        for shift in (-60.0, 60.0):
            loss, _ = run(m, k, old=k["old"] + shift, loss_type=kind)
            grads = torch.autograd.grad(loss, p.leaves(m))
            assert not loss.isnan()
            assert all(not g.isnan().any() for g in grads), kind


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "ppo"},
        {"importance_sampling_level": "batch"},
        {"importance_sampling_level": "sequence", "loss_type": "sapo"},
        {"importance_sampling_level": "sequence", "loss_type": "vespo"},
        {"importance_sampling_level": "sequence", "loss_type": "cispo"},
        {"loss_type": "dr_grpo"},
        {"max_completion_length": 0, "loss_type": "dr_grpo"},
        {"epsilon_low": 0.1, "loss_type": "cispo"},
        {"epsilon_high": 0.1, "loss_type": "sapo"},
        {"delta": 1.5, "loss_type": "vespo"},
        {"delta": 0.0},
        {"sapo_temperature_pos": 0.0, "loss_type": "sapo"},
        {"sapo_temperature_neg": 2.0},
        {"vespo_k_pos": 1.0},
        {"temperature": 0.0},
        {"beta": -0.1},
        {"use_bias_correction_kl": 3},
        {"chunk_size": True},
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused(options):
    with pytest.raises(UnsupportedOptionError):
        LigerFusedLinearGRPOLoss(**options)


def test_inputs_that_do_not_fit_are_refused():
    m = p.model()
    k = known(m)
    with pytest.raises(UnsupportedOptionError, match="num_items_in_batch"):
        run(m, k, items=5, loss_type="bnpo")
    with pytest.raises(InvalidInputError, match="no reference"):
        LigerFusedLinearGRPOLoss()(m.hidden, m.weight, m.target.clamp(min=0), k["mask"], k["advantages"])
    with pytest.raises(InvalidInputError, match="vllm_is_ratio"):
        run(m, k, ratio=torch.ones(5))
    with pytest.raises(InvalidInputError, match="advantages"):
        run(m, {**k, "advantages": torch.ones(7)})
    with pytest.raises(InvalidInputError, match="attention_mask"):
        run(m, {**k, "mask": torch.ones(6, 6)})
    with pytest.raises(InvalidInputError, match="no effect"):
        run(m, k, refs=k["old"], use_ref_model=False)
