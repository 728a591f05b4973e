"""The contract of logit_statistics: values by hand, slabs of a vocabulary, gradients, keys and errors."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_registry import Device, registry
from liger_registry.errors import InvalidInputError
from liger_registry.ops.logit_statistics import OP
from liger_registry.portable import logit_statistics
from liger_registry.problem import BACKWARD, FORWARD

INF = float("inf")
ALL = {"weighted": True, "entropy": True, "predict": True}
SCHEME = OP.schemes[0]


def options(**given):
    return {o.name: o.default for o in OP.options} | given


def eager(*inputs, **given):
    return logit_statistics.forward_eager(*inputs, device=Device.parse("cpu"), **options(**given))


def eager_backward(*tensors, **given):
    return logit_statistics.backward_eager(*tensors, device=Device.parse("cpu"), needs=(True,), **options(**given))[0]


def test_values_by_hand():
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, -INF], [4.0, 0.0, 0.0]], dtype=torch.float64)
    found = eager(logits, torch.tensor([2, -1, 0]), torch.tensor([1.0, 2.0, 3.0]).double(), **ALL)
    two = torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(found[0][0], torch.logsumexp(two - 1, 0))
    torch.testing.assert_close(found[0][1:], torch.tensor([3.0, 0.0]).double() + torch.tensor(2.0).double().log())
    assert found[1].tolist() == [2.0, 0.0, 4.0]
    assert found[2].tolist() == [8.0, -INF, 4.0]
    p = torch.softmax(logits, -1)
    torch.testing.assert_close(found[3], torch.stack([p[0] @ logits[0], torch.tensor(3.0).double(), p[2] @ logits[2]]))
    assert (found[4].tolist(), found[5].tolist()) == ([2.0, 3.0, 4.0], [2, 0, 0])


def test_a_row_of_the_target_alone_and_one_of_nothing():
    for call in (eager, lambda *t, **o: SCHEME.reference(*t, **options(**o))):
        log_rest, target_logit, *_ = call(torch.tensor([[2.0], [-INF]]), torch.tensor([0, 5]), None)
        assert log_rest.tolist() == [-INF, -INF]
        assert target_logit.tolist() == [2.0, 0.0]


def test_the_cap_makes_no_two_logits_equal():
    logits = torch.tensor([[200.0, 300.0, 250.0]])
    *_, best, prediction = eager(logits, torch.tensor([0]), None, softcap=1.0, predict=True)
    assert (best.tolist(), prediction.tolist()) == ([1.0], [1])


@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (3.0, 0.7), (0.0, -2.0)])
def test_gradcheck_and_the_two_backwards(softcap, scale):
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target, weight = torch.tensor([0, 4, -100, 5]), torch.rand(5, dtype=torch.float64)
    given = options(softcap=softcap, scale=scale, weighted=True, entropy=True)
    assert torch.autograd.gradcheck(lambda x: OP.reference(x, target, weight, **given), (logits,))
    results = SCHEME.reference(logits, target, weight, **given)
    grads = [torch.randn(4, dtype=torch.float64) for _ in range(4)]
    (right,) = torch.autograd.grad(results[:4], logits, grads)
    saved = [t.detach() for t in (results[0], results[1], results[3])]
    tensors = (*grads, None, None, logits.detach(), target, weight, *saved)
    torch.testing.assert_close(SCHEME.backward(*tensors, needs=(True,), **given)[0], right)
    torch.testing.assert_close(eager_backward(*tensors, **given), right)
    for absent in range(4):  # None is a gradient of 0
        some = [None if i == absent else g for i, g in enumerate(grads)]
        zeros = [torch.zeros_like(grads[0]) if g is None else g for g in some]
        right = eager_backward(*zeros, *tensors[4:], **given)
        torch.testing.assert_close(SCHEME.backward(*some, *tensors[4:], needs=(True,), **given)[0], right)
        torch.testing.assert_close(eager_backward(*some, *tensors[4:], **given), right)


def test_slabs_of_a_vocabulary_add_up_to_the_whole():
    torch.manual_seed(1)
    logits, target = 3 * torch.randn(6, 10, dtype=torch.float64), torch.tensor([0, 9, 4, -100, 5, 2])
    whole = eager(logits, target, None, weighted=True, entropy=True)
    slabs = [(logits[:, s], target - start) for start, s in ((0, slice(0, 4)), (4, slice(4, 10)))]
    parts = [eager(x, t, None, weighted=True, entropy=True) for x, t in slabs]
    rest = torch.stack([p[0] for p in parts])
    there = [(t >= 0) & (t < x.shape[1]) for x, t in slabs]
    torch.testing.assert_close(rest.logsumexp(0), whole[0])
    torch.testing.assert_close(sum(p[1] for p in parts), whole[1])
    torch.testing.assert_close(sum(p[2] for p in parts), whole[2])
    # The gradient of the entropy, slab by slab with the whole row's statistics, as the contract says.
    lse = torch.where(target >= 0, torch.logaddexp(whole[0], whole[1]), whole[0])
    upstream = torch.randn(6, dtype=torch.float64)
    zero = torch.zeros(6, dtype=torch.float64)
    given = options(entropy=True)
    found = [
        eager_backward(
            zero, zero, None, upstream, None, None, x, t, None, torch.where(here, whole[0], lse), whole[1], whole[3],
            **given,
        )
        for (x, t), here in zip(slabs, there, strict=True)
    ]  # fmt: skip
    leaf = logits.clone().requires_grad_()
    (right,) = torch.autograd.grad(OP.reference(leaf, target, entropy=True)[2], leaf, upstream)
    torch.testing.assert_close(torch.cat(found, 1), right)


def test_keys_and_what_backward_may_write():
    for dtype in ("bfloat16", "float64"):
        for description, phase in itertools.product(OP.odd(dtype), (FORWARD, BACKWARD)):
            problem = OP.problem(description, phase, "default", (True,))
            assert OP.has(problem)
            inputs, given = OP.example(problem, "cpu", 0, "random"), OP.options_of(problem)
            empty, full = SCHEME.allocate(*inputs, **given), SCHEME.reference(*inputs, **given)
            for ours, theirs in zip(empty, full, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert OP.private
    assert OP.overwrites == {"logits": "in_place"}
    assert list(OP.calls(None, 5, "bfloat16")) == []


def test_what_is_refused():
    handle, target = registry.get("logit_statistics"), torch.tensor([0, 1])
    for wrong, message in (
        ((torch.randn(1, 2, 3), target), "reshape"),
        ((torch.randn(2, 0), target), "at least 1"),
        ((torch.randn(2, 3), target.int()), "int64"),
        ((torch.randn(2, 3), target, torch.ones(3)), "weighted"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            handle(*wrong)


@pytest.mark.parametrize(
    "call", [eager_backward, lambda *t, **o: SCHEME.backward(*t, needs=(True,), **options(**o))[0]]
)
def test_no_share_is_more_than_one(call):
    """Given the statistics of other roundings, ``exp(z - log)`` would be infinite, and NaN times a factor of 0."""
    logits, target = torch.tensor([[128.0, 0.0], [256.0, 0.0], [128.0, 0.0]]), torch.tensor([-1, -1, 1])
    given = torch.tensor([2.0, 0.0, 3.0]), torch.tensor([0.0, 0.0, 5.0])
    saved = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, -INF])
    found = call(*given, None, None, None, None, logits, target, None, *saved, None)
    assert found.tolist() == [[2.0, 2.0], [0.0, 0.0], [3.0, 5.0]]
    found = call(
        *given, None, torch.ones(3), None, None, logits, target, None, *saved, torch.tensor([128.0, 256.0, 128.0]),
        entropy=True,
    )  # fmt: skip
    assert found.isfinite().all()
    nan = torch.full((3,), torch.nan)
    assert call(*given, None, None, None, None, logits, target, None, nan, nan, None)[0].isnan().all()
