"""Losses in compiled graphs: one graph each, also for a second loss with other numbers, or a break that says why."""

from __future__ import annotations

import sys

import preference as p
import pytest
import torch

from liger_registry.chunked_loss import (
    Head,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LinearDistillationLoss,
    distillation,
    distilled,
    slabs,
)

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def fresh():
    """Graphs of one test are none of another's."""
    yield
    torch._dynamo.reset()


def powers(student, teacher, power=2.0):
    return (student - teacher).abs().pow(power).mean(-1)


def distil(loss, hidden, weight, bias, other, other_weight, other_bias, target):
    found = loss(hidden, weight, other, other_weight, target, bias, other_bias)
    return found if isinstance(found, tuple) else (found,)


def tensors(m):
    return m.hidden, m.weight, m.bias, m.ref_hidden, m.ref_weight, m.ref_bias, m.target


def alike(step, compiled, m, *args):
    right, mine = step(*args), compiled(*args)
    torch.testing.assert_close(mine, right)
    assert [t.requires_grad for t in mine] == [t.requires_grad for t in right]
    grads = [torch.autograd.grad(x[0] * 3, p.leaves(m)) for x in (mine, right)]
    torch.testing.assert_close(*grads)


def test_distillation_is_one_graph(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    monkeypatch.setattr(powers, "__module__", "own_module")
    m = p.model()
    m.target[0] = p.IGNORED
    compiled = torch.compile(distil, fullgraph=True, backend="aot_eager")
    for loss in (
        LigerFusedLinearJSDLoss(),
        LigerFusedLinearJSDLoss(0.3, 0.9, beta=0.2, temperature=2.0, return_soft_hard_loss=True),
        LigerFusedLinearCosineSimilarityLoss(return_soft_hard_loss=True, head=Head(softcap=3.0)),
        LigerFusedLinearJSDLoss(1.0, 0.0),
        LinearDistillationLoss(powers, power=3.0, head=Head(compact="on")),
    ):
        alike(distil, compiled, m, loss, *tensors(m))


def test_distillation_by_inductor():
    m = p.model(bias=False)
    alike(distil, torch.compile(distil, fullgraph=True), m, LigerFusedLinearJSDLoss(), *tensors(m))


@pytest.mark.parametrize("needed", ["hidden", "weight", "bias", "none"])
def test_frozen_parts_in_a_graph(needed):
    m = p.model()
    for part in ("hidden", "weight", "bias"):
        getattr(m, part).requires_grad_(part == needed)
    compiled = torch.compile(distil, fullgraph=True, backend="aot_eager")
    if needed != "none":
        alike(distil, compiled, m, LigerFusedLinearJSDLoss(), *tensors(m))
        return
    (loss,) = compiled(LigerFusedLinearJSDLoss(), *tensors(m))
    assert not loss.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's, where it resumes
def test_a_function_without_a_name_breaks_the_graph_and_says_so():
    m, loss = p.model(), LinearDistillationLoss(lambda s, t: (s - t).square().mean(-1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="imported by"):
        torch.compile(distil, fullgraph=True, backend="aot_eager")(loss, *tensors(m))
    torch._dynamo.reset()
    alike(distil, torch.compile(distil, backend="aot_eager"), m, loss, *tensors(m))


def test_the_operator():
    m = p.model()
    numbers = (True, 0.5, 0.25, -100, 1.0)
    text = distilled.text_of(distillation.JensenShannon, 0.5, None, None, (3.0, 1.0, 1.0, "auto", 1 << 20), numbers)
    head = Head(softcap=3.0, compact="off", memory_budget=1 << 20)
    assert distilled._job_of(text) == slabs.Job(distillation.JensenShannon(0.5), True, 0.5, 0.25, -100, 1.0, head)
    rows = [t.detach().flatten(0, 1) if t.dim() == 3 else t.detach() for t in tensors(m)[:6]]
    rows = [t.requires_grad_(n < 3) for n, t in enumerate(rows)]
    args = (*rows, m.target.flatten(), text, [True, True, True])
    torch.library.opcheck(torch.ops.liger_registry.linear_distillation.default, args)


def test_numbers_that_differ_from_an_earlier_graphs():
    """As those of a second loss, or of a schedule: symbols, to the compiler."""
    m = p.model()

    def preferred(loss, *inputs):
        return loss(*inputs)[:1]

    compiled = torch.compile(preferred, fullgraph=True, backend="aot_eager")
    refs = (m.ref_hidden, m.ref_weight, m.ref_bias)
    for beta in (0.1, 0.2, 0.3):
        loss = LigerFusedLinearDPOLoss(beta=beta, head=Head(softcap=beta * 30, logit_scale=beta * 5))
        alike(preferred, compiled, m, loss, m.weight, m.hidden, m.target, m.bias, *refs)
    ids, mask = m.target.clamp(min=0), (m.target >= 0).long()
    old = -3 + 0.1 * torch.randn(mask.shape)
    for high in (0.2, 0.25, 0.3):
        loss = LigerFusedLinearGRPOLoss(use_ref_model=False, epsilon_high=high, temperature=high * 4)
        alike(preferred, compiled, m, loss, m.hidden, m.weight, ids, mask, torch.linspace(-1, 1, 6), m.bias, None, old)
