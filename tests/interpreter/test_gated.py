"""The Triton kernels of swiglu, geglu and relu_squared in Triton's interpreter, beyond what conformance asks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from liger_registry import Device
from liger_registry.examples import fill
from liger_registry.kernels import geglu, relu_squared, swiglu

DEVICE = Device.parse("interpreter")
TILE = {"block": 64, "block_rows": 4, "num_warps": 4}
CONFIGS = {
    "flat": {"block": 1024, "num_warps": 4},
    "rows": TILE,
    "persistent": {**TILE, "programs_per_unit": 1, "num_stages": 3},
}
FORMULAS = [
    (swiglu, {}, functional.silu),
    (geglu, {"approximate": "tanh"}, lambda x: functional.gelu(x, approximate="tanh")),
    (geglu, {"approximate": "none"}, functional.gelu),
]


def forward(module, name, *tensors, **options):
    return getattr(module, f"forward_{name}")(*tensors, device=DEVICE, **options, **CONFIGS[name])


def backward(module, name, *tensors, needs=(True, True), **options):
    return getattr(module, f"backward_{name}")(*tensors, device=DEVICE, needs=needs, **options, **CONFIGS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_has_the_bits_of_the_models_formula(name, dtype):
    # Above -2 PyTorch's own forms of gelu do not cancel yet.
    gate = torch.linspace(-2, 8, 9 * 131).view(9, 131).to(dtype)
    up = fill((9, 131), dtype, "cpu", 1)
    for module, options, act in FORMULAS:
        (y,) = forward(module, name, gate, up, **options)
        right = act(gate) * up
        # A last bit of fp32 crosses a tie of fp16 for one in some thousands.
        assert (y != right).sum() <= 2
        (packed,) = forward(module, name, torch.cat((gate, up), -1), None, **options)
        assert torch.equal(packed, y)
    scales = {"gate_multiplier": 0.884, "down_multiplier": -1.3}
    (y,) = forward(swiglu, name, gate, up, **scales)
    assert (y != functional.silu(gate * 0.884) * up * -1.3).sum() <= 2
    (y,) = forward(relu_squared, name, gate)
    assert torch.equal(y, torch.square(torch.relu(gate)))


# An infinity times zero is NaN here as it is in PyTorch; numpy, which the interpreter computes with, warns of it.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("module", "options", "act"), FORMULAS)
def test_fp32_is_right_where_formulas_cancel_or_overflow(module, options, act):
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.logspace(-30, 0, 99), -torch.logspace(-30, 0, 99)))[None]
    wide = x.double().requires_grad_()

    def right_of(values):
        # gelu by the error function: erfc holds the digits that 1 + erf loses, in float64 too, and unlike PyTorch's
        # vectorised gelu it is right at the ends on every processor.
        if options.get("approximate") == "none":
            return values * torch.special.erfc(-values / 2**0.5) / 2
        return act(values)

    right = right_of(wide)
    (slope,) = torch.autograd.grad(right.sum(), wide)
    one = torch.ones_like(x)
    (y,) = forward(module, "flat", x, one, **options)
    dgate, dup = backward(module, "flat", one, x, one, **options)
    near = x > (-5 if options.get("approximate") == "tanh" else -12)  # float64's 1 + tanh is right to 1e-9 there
    for found in (y, dup):
        error = (found - right).abs() / right.abs()
        assert error[near].max() < 5e-6
        assert error[near & (x > -2)].max() < 1.2e-6
    # The slope is 0 at a point, and a sum of terms no larger than 1.2.
    assert (dgate - slope).abs().max() < 1e-6
    ends = torch.tensor([[float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e20, -1e20, 100.0, -120.0]])
    (y,) = forward(module, "flat", ends, torch.ones_like(ends), **options)
    torch.testing.assert_close(y, right_of(ends.double()).float(), equal_nan=True, rtol=1e-6, atol=1e-30)
    dgate, _ = backward(module, "flat", torch.ones_like(ends), ends, torch.ones_like(ends), **options)
    expected = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(dgate[0, 3:], expected, rtol=0, atol=1e-30)


def views():
    def made(*shape):
        return fill(shape, torch.bfloat16, "cpu", 0)

    return {
        "heads": made(2, 5, 3, 32).transpose(1, 2),
        "columns": made(32, 6).t(),
        "slice_of_batches": made(3, 4, 80)[1:, ::2, 3:35],
        "expanded": made(1, 32).expand(7, 32),
        "five": made(2, 2, 3, 2, 32).permute(2, 0, 3, 1, 4),
        "six": made(2, 1, 2, 2, 3, 2, 32).permute(5, 3, 0, 4, 2, 1, 6),
        "vector": made(32),
        "one_pair": made(5, 8)[:, :2],
    }


@pytest.mark.parametrize(
    ("name", "view"), [*itertools.product(["rows"], views()), ("flat", "heads"), ("persistent", "columns")]
)
def test_layouts(name, view):
    gate = views()[view]
    width = gate.shape[-1]
    moved = fill((width, *gate.shape[:-1]), gate.dtype, "cpu", 3).movedim(0, -1)
    repeated = torch.ones((), dtype=gate.dtype).expand(gate.shape)
    for up, dy in ((gate * 0.5, repeated), (repeated, moved), (None, moved[..., : width // 2])):
        first, second = gate.chunk(2, -1) if up is None else (gate, up)
        (y,) = forward(swiglu, name, gate, up)
        torch.testing.assert_close(y, functional.silu(first) * second)
        found = backward(swiglu, name, dy, gate, up)
        leaves = [t.double().requires_grad_() for t in (gate, up) if t is not None]
        halves = leaves[0].chunk(2, -1) if up is None else leaves
        right = torch.autograd.grad(functional.silu(halves[0]) * halves[1], leaves, dy.double())
        assert (found[1] is None) == (up is None)
        for a, b in zip(found, right, strict=False):
            torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-6)


def test_views_are_read_through_their_strides(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, **options: copies.append(self.shape))
    gate = views()["five"]
    for name in CONFIGS:
        for up in (gate, None):
            (y,) = forward(swiglu, name, gate, up)
            backward(swiglu, name, torch.ones((), dtype=y.dtype).expand(y.shape), gate, up)
    assert copies == []


@pytest.mark.parametrize("name", CONFIGS)
def test_only_what_is_needed_is_computed(name):
    gate, up, dy = (fill((5, 41), torch.float32, "cpu", seed) for seed in range(3))
    whole = backward(swiglu, name, dy, gate, up)
    for needs in itertools.product([True, False], repeat=2):
        found = backward(swiglu, name, dy, gate, up, needs=needs)
        assert tuple(g is not None for g in found) == needs
        assert all(a is None or torch.equal(a, b) for a, b in zip(found, whole, strict=True))
        (packed, none) = backward(swiglu, name, dy, torch.cat((gate, up), -1), None, needs=needs)
        assert none is None
        assert (packed is not None) == needs[0]
        assert packed is None or torch.equal(packed, torch.cat(whole, -1))
    assert backward(relu_squared, name, dy, gate, needs=(False,)) == (None,)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_fully_written(name):
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN, so that whatever is not written shows
    for rows, width in ((3, 1), (9, 67), (0, 8)):
        packed, dy = fill((rows, 2 * width), torch.float32, "cpu", 0), fill((rows, width), torch.float32, "cpu", 1)
        (y,), (found, _) = forward(swiglu, name, packed, None), backward(swiglu, name, dy, packed, None)
        assert found.shape == packed.shape
        assert y.isfinite().all()
        assert found.isfinite().all()
