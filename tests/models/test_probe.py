"""``probe``: stand-ins leave the original alone, and comparisons notice what they must."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from liger_registry.transformers.engine.probe import CannotStandIn, confirm, difference, inputs, stand_in


class MLP(nn.Module):
    def __init__(self, hidden, wide, device="meta"):
        super().__init__()
        self.hidden_size, self.wide, self.limit = hidden, wide, 7
        self.up = nn.Linear(hidden, 2 * wide, bias=False, device=device)
        self.down = nn.Linear(wide, hidden, device=device)
        self.scale = nn.Parameter(torch.ones(hidden, device=device))

    def forward(self, x):
        gate, up = self.up(x).split(self.wide, dim=-1)
        return self.down(torch.relu(gate) * up).view(*x.shape[:-1], self.hidden_size) * self.scale


def test_large_widths_shrink_together_with_what_repeats_them():
    made = stand_in(MLP(4096, 14336))
    assert (made.hidden_size, made.wide, made.limit) == (2, 7, 7)
    assert tuple(made.up.weight.shape) == (14, 2)
    assert made.down.bias is not None
    assert made(torch.randn(3, 2)).shape == (3, 2)
    assert made.up.weight.device.type == "cpu"


def test_small_widths_stay():
    assert tuple(stand_in(MLP(41, 43)).up.weight.shape) == (86, 41)


def test_sizes_with_nothing_in_common_cannot_stand_in():
    with pytest.raises(CannotStandIn, match="too large"):
        stand_in(MLP(4096, 14337))


def test_the_original_is_left_alone():
    module = MLP(8, 12, "cpu")
    module.register_forward_hook(lambda *_: pytest.fail("the original's hook ran"))
    module.forward = lambda x: pytest.fail("what is bound on the original ran")
    before = {name: p.clone() for name, p in module.named_parameters()}
    dictionary = dict(module.__dict__)
    made = stand_in(module, torch.bfloat16)
    made(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert module.__dict__ == dictionary
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
        assert parameter.grad is None
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}


def normed(x, cast=True):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y.to(x.dtype) if cast else y) * torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype)


def test_equal_functions_differ_in_nothing():
    for dtype in (torch.float32, torch.bfloat16):
        assert difference(normed, lambda x: normed(x), inputs((3, 41), dtype)) == ""


def test_a_rounding_less_is_noticed():
    late = lambda x: normed(x, cast=False).to(x.dtype)  # noqa: E731
    assert difference(normed, late, inputs((3, 41), torch.float32)) == ""
    assert "rounded otherwise" in difference(normed, late, inputs((3, 41), torch.bfloat16))


def test_wrong_values_gradients_and_dtypes_are_noticed():
    (x,) = inputs((3, 41), torch.float32)
    assert "values: off" in difference(normed, lambda x: normed(x) * 1.001, [x])
    assert "gradient 0" in difference(normed, lambda x: normed(x).detach() + x - x.detach(), [x])
    assert "there is one" in difference(lambda x, y: normed(x), lambda x, y: normed(x) + 0 * y, [x, x])
    assert "bfloat16" in difference(normed, lambda x: normed(x).bfloat16(), [x])


def test_dropout_draws_the_same_numbers_in_both():
    drop = nn.Dropout(0.5)
    assert difference(lambda x: drop(x) * 2, lambda x: 2 * drop(x), inputs((3, 41), torch.float32)) == ""


def test_random_numbers_of_the_caller_are_not_used_up():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    difference(lambda x: nn.functional.dropout(x), lambda x: x, inputs((3, 41), torch.float32))
    stand_in(MLP(8, 12))
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_confirm_says_what_fails():
    module = MLP(8, 12, "cpu")
    shape = lambda made: (2, made.hidden_size)  # noqa: E731
    own = lambda made: type(made).forward.__get__(made)  # noqa: E731
    assert confirm(module, own, shape, (torch.float32, torch.bfloat16)) == ""
    doubled = lambda made: lambda x: 2 * own(made)(x)  # noqa: E731
    assert "in float32 differs in values" in confirm(module, doubled, shape, (torch.float32,))

    def broken(made):
        raise RuntimeError("no such thing")

    assert "RuntimeError: no such thing" in confirm(module, broken, shape, (torch.float32,))
