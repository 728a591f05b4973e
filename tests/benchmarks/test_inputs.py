"""The tensors of cases and their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import models
from benchmarks.cases import Case
from benchmarks.inputs import backward, error, formula, make, outputs_of, relative_error
from benchmarks.measure import weight_gradient
from benchmarks.table import TABLE

CPU = torch.device("cpu")
CASES = list(dict.fromkeys(row.case.tiny() for row in (*TABLE, *models.rows())))
LOSS = Case("fused_linear_cross_entropy", (64, 16, 48))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_finite_results_and_gradients_for_all_that_learns(case):
    inputs = make(case, CPU)
    outputs = outputs_of(formula(case)(*inputs.tensors))
    if inputs.upstream is not None:
        assert [o.shape for o in outputs] == [u.shape for u in inputs.upstream]
    gradients = backward(outputs, inputs)
    assert len(gradients) == len(inputs.leaves) >= 1
    assert all(t.isfinite().all() for t in (*outputs, *gradients))
    assert all(g.abs().sum() > 0 for g in gradients)


def test_seeds_differ_and_one_seed_does_not():
    case = Case("rms_norm", (8, 16))
    assert make(case, CPU, 1).equals(make(case, CPU, 1))
    assert not make(case, CPU, 1).equals(make(case, CPU, 2))


def test_heads_lie_as_a_projection_leaves_them():
    inputs = make(Case("rope", (2, 8, 4, 2, 16)), CPU)
    q, k = inputs.tensors[:2]
    assert q.shape == (2, 4, 8, 16)
    assert q.transpose(1, 2).is_contiguous()
    assert k.transpose(1, 2).is_contiguous()
    assert inputs.upstream is not None
    assert all(u.transpose(1, 2).is_contiguous() for u in inputs.upstream)
    turned = make(Case("rope", (2, 8, 4, 2, 16), turned=True), CPU)
    assert turned.upstream is not None
    assert all(u.is_contiguous() for u in turned.upstream)


def test_rotations_keep_lengths():
    inputs = make(Case("rope", (1, 8, 2, 1, 16)), CPU)
    outputs = formula(Case("rope", (1, 8, 2, 1, 16)))(*inputs.tensors)
    for before, after in zip(inputs.tensors[:2], outputs, strict=True):
        torch.testing.assert_close(after.float().norm(dim=-1), before.float().norm(dim=-1), rtol=0.02, atol=0.0)


def test_ignored_tokens_are_spread_and_as_many_as_asked():
    target = make(Case("fused_linear_cross_entropy", (64, 16, 48), ignored=0.5), CPU).tensors[2]
    assert (target == -100).sum() == 32
    assert 8 <= (target[:32] == -100).sum() <= 24
    assert target[target != -100].min() >= 0


def test_gemmas_norm_adds_one_to_its_weight():
    case = Case("rms_norm", (4, 16), casting="gemma", offset=1.0)
    x, weight = make(case, CPU).tensors
    assert weight.abs().mean() < 0.5
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    assert error(formula(case)(x, weight), right) < 4e-3


def test_a_cap_bounds_the_logits():
    case = Case("fused_linear_cross_entropy", (8, 16, 48), softcap=0.5)
    x, weight, target = (t.detach() for t in make(case, CPU).tensors)
    logits = 0.5 * torch.tanh(F.linear(x, weight).double() / 0.5)
    assert float(formula(case, wide=True)(x, weight, target)) == pytest.approx(
        float(F.cross_entropy(logits, target)), rel=1e-3
    )


def test_log_probabilities_of_ignored_tokens_are_zero():
    case = Case("linear_logp", (16, 8, 24), ignored=0.25)
    x, weight, target = make(case, CPU).tensors
    found = formula(case)(x, weight, target)
    assert (found[target == -100] == 0).all()
    assert (found[target != -100] < 0).all()


def test_a_clone_shares_nothing_and_takes_values_back():
    inputs = make(Case("rope", (2, 8, 4, 2, 16)), CPU)
    clone = inputs.clone()
    assert clone.equals(inputs)
    assert [t.stride() for t in clone.all] == [t.stride() for t in inputs.all]
    assert [t.requires_grad for t in clone.tensors] == [t.requires_grad for t in inputs.tensors]
    with torch.no_grad():
        clone.tensors[0].zero_()
    assert not clone.equals(inputs)
    clone.restore(inputs)
    assert clone.equals(inputs)


def test_bytes_count_arguments_and_upstream():
    assert make(Case("rms_norm", (8, 16)), CPU).bytes == 2 * (8 * 16 + 16 + 8 * 16)


def test_the_error_is_a_norm_over_a_norm():
    assert error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error([torch.tensor([1.0]), torch.tensor([2.2])], [torch.tensor([1.0]), torch.tensor([2.0])]) == (
        pytest.approx(0.1)
    )
    nothing = relative_error([torch.tensor([torch.nan]), torch.tensor([9.0])], [torch.ones(1), torch.ones(1)])
    assert nothing != nothing


def test_the_gradient_that_heads_are_held_to_is_autograds():
    inputs = make(LOSS, CPU)
    x, weight, target = (t.detach() for t in inputs.tensors)
    weight = weight.double().requires_grad_()
    (right,) = torch.autograd.grad(F.cross_entropy(F.linear(x.double(), weight), target), weight)
    torch.testing.assert_close(weight_gradient(inputs), right)


@pytest.mark.parametrize("case", [LOSS, Case("cross_entropy", (8, 32))], ids=lambda case: case.op)
def test_wide_losses_take_their_logits_in_fp32(case):
    tensors = make(case, CPU).tensors
    assert formula(case)(*tensors).dtype == torch.bfloat16
    assert formula(case, wide=True)(*tensors).dtype == torch.float32
