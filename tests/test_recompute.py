"""Gradients by recomputation equal autograd's, below autograd too."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_registry.recompute import gradients


def function(x, w, b):
    y = x * w if w is not None else x * 2
    return y.sin() + b if b is not None else y.sin()


def tensors():
    return torch.randn(4, 3), torch.randn(3), torch.randn(3)


def expected(inputs, grad, needs):
    leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(function(*leaves), wanted, grad))
    return [next(found) if x is not None and x.requires_grad else None for x in leaves]


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_all_combinations(needs):
    inputs, grad = tensors(), torch.randn(4, 3)
    with torch.no_grad():
        found = gradients(function, inputs, (grad,), needs)
    for mine, right in zip(found, expected(inputs, grad, needs), strict=True):
        assert (mine is None) == (right is None)
        assert mine is None or torch.equal(mine, right)
    assert all(x.grad is None and not x.requires_grad for x in inputs)


def test_absent_inputs_and_nothing_needed():
    x, _, _ = tensors()
    grad = torch.ones(4, 3)
    found = gradients(function, (x, None, None), (grad,), (True, True, True))
    assert torch.equal(found[0], expected((x, None, None), grad, (True, True, True))[0])
    assert found[1:] == (None, None)
    assert gradients(function, (x, None, None), (grad,), (False, False, True)) == (None, None, None)


def test_outputs_without_a_graph_are_left_out():
    x = torch.randn(4, 3)

    def several(x):
        return 2 * x, x.argmax(-1), torch.ones(3), 3 * x

    grads = (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), torch.ones(3), None)
    (found,) = gradients(several, (x,), grads, (True,))
    assert torch.equal(found, torch.full((4, 3), 2.0))
    (found,) = gradients(lambda x: torch.ones(3), (x,), (torch.ones(3),), (True,))
    assert torch.equal(found, torch.zeros(4, 3))


def test_an_input_that_has_no_influence_gets_zeros():
    x, w = torch.randn(3), torch.randn(3)
    found = gradients(lambda x, w: 2 * x, (x, w), (torch.ones(3),), (True, True))
    assert torch.equal(found[1], torch.zeros(3))


def test_inside_a_library_kernel():
    library = torch.library.Library("liger_registry_test_recompute", "DEF")
    library.define("grads(Tensor x, Tensor w, Tensor g) -> Tensor[]")
    seen = []

    def kernel(x, w, g):
        found = gradients(function, (x, w, None), (g,), (True, True, False))
        after = x.detach().requires_grad_() * 2
        seen.append(after.requires_grad)  # below autograd nothing is recorded, before and after
        return [t for t in found if t is not None]

    library.impl("grads", kernel, "CompositeExplicitAutograd")
    torch.library.register_autograd("liger_registry_test_recompute::grads", lambda ctx, *grads: None, lib=library)
    x, w, _ = tensors()
    grad = torch.randn(4, 3)
    for inputs in ((x, w), (x.clone().requires_grad_(), w.clone().requires_grad_())):
        found = torch.ops.liger_registry_test_recompute.grads(*inputs, grad)
        for mine, right in zip(found, expected((x, w, None), grad, (True, True, False)), strict=False):
            assert torch.equal(mine, right)
            assert mine.grad_fn is None or inputs[0].requires_grad
    assert seen == [False, False]


def test_grad_mode_is_put_back():
    with torch.no_grad():
        gradients(function, tensors(), (torch.ones(4, 3),), (True, False, False))
        assert not torch.is_grad_enabled()
        with pytest.raises(ZeroDivisionError):
            gradients(lambda x: 1 / 0, (torch.ones(1),), (torch.ones(1),), (True,))
        assert not torch.is_grad_enabled()
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad
