"""The cosine distillation's own: its cross-entropy from the same walk, and what neither of both needs."""

from __future__ import annotations

import preference as p
import pytest
import torch

from liger_registry import registry
from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
    LinearDistillationLoss,
    slabs,
)
from liger_registry.chunked_loss.divergence import Cosine
from liger_registry.runtime import registry as runtime


def call(loss, m):
    return loss(m.hidden, m.weight, m.ref_hidden, m.ref_weight, m.target, m.bias, m.ref_bias)


def test_the_cross_entropy_is_part_of_the_same_operation(monkeypatch):
    """Of equal vocabularies; of others the student's has columns of its own."""
    called, real = [], type(runtime).get
    monkeypatch.setattr(type(runtime), "get", lambda self, op, **told: called.append(op) or real(self, op, **told))
    for extra, weights, right in (
        (0, (0.5, 0.5), ["logit_cosine"]),
        (0, (0.0, 1.0), ["logit_cosine"]),
        (0, (1.0, 0.0), ["cross_entropy"]),
        (5, (0.5, 0.5), ["cross_entropy", "logit_cosine"]),
    ):
        m = p.model(bias=False)
        m.ref_weight = torch.cat([m.ref_weight, torch.randn(extra, m.ref_weight.shape[1])])
        call(LigerFusedLinearCosineSimilarityLoss(*weights), m)
        assert called == right
        called.clear()


@pytest.mark.parametrize("vocab", [37, 36])
def test_the_gradient_lies_in_the_students_slab(monkeypatch, vocab):
    """So that there is no third one; also where rows are longer than their part that is given."""
    called, real = [], type(runtime).get

    def get(self, op, **told):
        def call(student, *args, **options):
            found = real(self, op, **told)(student, *args, **options)
            called.append(found[-1].data_ptr() == student.data_ptr())
            return found

        return call

    monkeypatch.setattr(type(runtime), "get", get)
    student, teacher = torch.randn(5, 37)[:, :vocab], torch.randn(5, vocab)
    before = student.clone()
    labels, factor = torch.tensor([1, 2, -100, 3, 4]), torch.tensor(0.5)
    Cosine(0.5).with_cross_entropy(student, teacher, labels, -100, factor, (0.5, 0.5))
    Cosine(0.5)(student, teacher, labels != -100, 1.0, factor)
    assert called == [True, True]
    assert not torch.equal(student, before)


def test_a_budget_has_larger_slabs_without_the_third():
    def planned(divergence, budget, teacher_vocab=1000):
        student, teacher = (
            slabs.Model(
                *(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8192, 64), (vocab, 64))), None
            )
            for vocab in (1000, teacher_vocab)
        )
        return slabs.plan(
            slabs.Job(divergence, True, 0.5, 0.5, -100, 1.0, Head(memory_budget=budget)), student, teacher, 8192
        )

    # Of a row 2,000 bytes a slab; 1 MiB for the gradient of the hidden states and .25 for the head's.
    budget = (1024 * 2 * 2000) + (1 << 20) + 64000 * 4
    assert planned(Cosine(0.5), budget)[0] == 1024
    assert planned(LigerFusedLinearJSDLoss().divergence, budget)[0] == 512
    assert planned(Cosine(0.5), budget, 1001)[0] == 512


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("scale", [0.3, -2.0])
@pytest.mark.parametrize("extra", [0, 5])
def test_scales(weights, scale, extra):
    hard, soft = weights
    m, head = p.model(bias=False), {"logit_scale": scale, "temperature": 0.7}
    m.ref_weight = torch.cat([m.ref_weight, torch.randn(extra, m.ref_weight.shape[1])])
    loss = LigerFusedLinearCosineSimilarityLoss(hard, soft, return_soft_hard_loss=True, head=Head(**head))
    p.compare(
        lambda m: (lambda found: (found[0], found[1:]))(call(loss, m)),
        lambda m: p.distilled(m, p.cosine(0.5), hard, soft, **head),
        m,
    )


def test_an_angle_alone_does_not_scale_logits():
    """Bit for bit: a logit of 16 bits would be rounded once more."""
    m = p.model(dtype=torch.bfloat16)
    found = []
    for head in (Head(), Head(logit_scale=0.3)):
        loss = call(LigerFusedLinearCosineSimilarityLoss(0.0, 1.0, head=head), m)
        found.append((loss, *torch.autograd.grad(loss, p.leaves(m))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_rows_of_the_teachers_of_zeros_have_no_direction():
    m = p.model(bias=False)
    with torch.no_grad():
        m.ref_hidden.zero_()
    loss = call(LigerFusedLinearCosineSimilarityLoss(0.0, 1.0), m)
    assert loss.item() == pytest.approx(0.5)
    assert not any(g.any() for g in torch.autograd.grad(loss, p.leaves(m)))


def test_it_is_the_loss_of_ones_own():
    """Whose gradient is by autograd, and whose cross-entropy is apart; also of implementations that are pinned."""
    m = p.model()
    own = call(LinearDistillationLoss(p.cosine(0.4), weight_hard_loss=0.3, weight_soft_loss=0.9), m)
    right = [own, *torch.autograd.grad(own, p.leaves(m))]
    with registry.use("logit_cosine", {"forward": "eager"}):
        loss = call(LigerFusedLinearCosineSimilarityLoss(0.3, 0.9, 0.4), m)
        torch.testing.assert_close([loss, *torch.autograd.grad(loss, p.leaves(m))], right, rtol=1e-4, atol=1e-6)
