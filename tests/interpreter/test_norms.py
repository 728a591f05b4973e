"""What the conformance suite does not ask of layer_norm's and fused_add_rms_norm's kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from liger_registry import Device
from liger_registry.examples import fill
from liger_registry.kernels import fused_add_rms_norm, fused_add_rms_norm_split, layer_norm, layer_norm_split
from liger_registry.ops import fused_add_rms_norm as fused_contract
from liger_registry.ops import layer_norm as layer_contract

DEVICE = Device.parse("interpreter")
OPS = {"layer_norm": layer_contract.OP, "fused_add_rms_norm": fused_contract.OP}
MODULES = {
    "layer_norm": (layer_norm, layer_norm_split),
    "fused_add_rms_norm": (fused_add_rms_norm, fused_add_rms_norm_split),
}
FORWARD = {
    "row": {"programs_per_unit": 0, "num_warps": 4},
    "row_ahead": {"programs_per_unit": 1, "num_warps": 4, "num_stages": 3},
    "multi_row": {"block_rows": 4, "programs_per_unit": 1, "num_warps": 4, "num_stages": 3},
    "column_split": {"splits": 2, "block": 16, "num_warps": 4},
}
BACKWARD = {
    "persistent": {"programs_per_unit": 1, "block_rows": 2, "num_warps": 4, "num_stages": 3},
    "persistent_reload": {
        "programs_per_unit": 2, "block_rows": 1, "num_warps": 4, "num_stages": 2, "reload_weight": True,
    },
    "column_split": {
        "splits": 2, "block": 16, "num_warps": 4, "block_rows": 2, "programs_per_unit": 2, "num_stages": 3,
    },
}  # fmt: skip


def call(op, phase, name, *tensors, **options):
    """The launch function of an implementation on some tensors, with the config of that name."""
    config = (FORWARD if phase == "forward" else BACKWARD)[name]
    function = f"{phase}_{name.replace('_ahead', '').replace('_reload', '')}"
    module = MODULES[op][name == "column_split"]
    filled = {**{o.name: o.default for o in OPS[op].options}, **options}
    return getattr(module, function)(*tensors, device=DEVICE, **filled, **config)


def inputs_of(op, x, weighted=True):
    hidden = x.shape[-1]
    weight = fill((hidden,), x.dtype, "cpu", 1, scale=0.25) + 1 if weighted else None
    if op == "layer_norm":
        return x, weight, fill((hidden,), x.dtype, "cpu", 2, scale=0.25) if weighted else None
    return x, fill(tuple(x.shape), x.dtype, "cpu", 3), weight


def held(op, inputs, results):
    """What backward gets behind the gradients."""
    named = dict(zip((*(i.name for i in OPS[op].inputs), *OPS[op].outputs, *OPS[op].schemes[0].saved),
                     (*inputs, *results), strict=True))  # fmt: skip
    scheme = OPS[op].schemes[0]
    return [named[name] for name in (*scheme.saved_inputs, *scheme.saved_outputs, *scheme.saved)]


def gradients(op, inputs, grads):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    outputs = OPS[op].reference(*leaves)
    found = iter(torch.autograd.grad(outputs, [t for t in leaves if t is not None], grads))
    return tuple(None if t is None else next(found) for t in leaves)


@pytest.mark.parametrize("name", FORWARD)
def test_a_mean_far_from_zero_costs_no_digits(name):
    # Multiples of 1/8 are exact in fp32 here, sums of their squares are not. The levels differ from block to block,
    # and the blocks' own spread is a thousandth of them.
    x = 8192 + torch.randint(-8, 9, (3, 80)) / 8
    x[1] = 0.25 * torch.arange(80).div(16, rounding_mode="floor") - 4096 + x[1] % 1
    y, mean, rstd = call("layer_norm", "forward", name, x, None, None, eps=1e-12)
    exact = OPS["layer_norm"].schemes[0].reference(x.double(), None, None, eps=1e-12)
    torch.testing.assert_close(mean.double(), exact[1], rtol=2e-7, atol=0)
    torch.testing.assert_close(rstd.double(), exact[2], rtol=5e-5, atol=0)  # E[x^2] - E[x]^2 would be noise
    torch.testing.assert_close(y.double(), exact[0], rtol=0, atol=4e-3)  # the mean's last digit is 1/1024


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_has_torchs_bits_where_statistics_are_exact(name, dtype):
    half = (torch.randint(-16, 17, (2, 24)) / 4).to(dtype)
    given = inputs_of("layer_norm", torch.cat([half, -half], -1))
    y, _, _ = call("layer_norm", "forward", name, *given)
    assert torch.equal(y, torch.nn.functional.layer_norm(given[0], (48,), *given[1:]))


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_forward_has_the_bits_of_the_familys_formula(name, casting):
    x, residual = (torch.randint(-16, 17, (2, 2, 48)) / 4).bfloat16()
    weight = fill((48,), torch.bfloat16, "cpu", 1) + 1
    options = {"offset": 1.0, "casting": casting}
    found = call("fused_add_rms_norm", "forward", name, x, residual, weight, **options)
    assert all(
        torch.equal(a, b)
        for a, b in zip(found[:2], fused_contract.reference(x, residual, weight, **options), strict=True)
    )


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("op", OPS)
def test_only_what_is_needed_is_computed(op, name):
    given = inputs_of(op, fill((3, 64), torch.float32, "cpu", 0))
    results = call(op, "forward", "row", *given)
    grads = [fill((3, 64), torch.float32, "cpu", 7 + n) for n in range(len(OPS[op].outputs))]
    kept = held(op, given, results)
    every = call(op, "backward", name, *grads, *kept, needs=(True,) * 3)
    for gradient, right in zip(every, gradients(op, given, grads), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-4)
    assert op == "layer_norm" or every[0] is every[1]
    for needs in [(True, False, False), (False, True, False), (False, False, True), (False,) * 3]:
        found = call(op, "backward", name, *grads, *kept, needs=needs)
        for gradient, need, whole in zip(found, needs, every, strict=True):
            assert (gradient is None) != need
            assert not need or torch.equal(gradient, whole)


def views():
    def made(*shape):
        return fill(shape, torch.bfloat16, "cpu", 0)

    return {
        "five": made(2, 1, 3, 2, 32).permute(2, 0, 3, 1, 4),
        "six": made(2, 2, 2, 2, 2, 32).permute(4, 3, 0, 2, 1, 5),
    }


@pytest.mark.ci
@pytest.mark.parametrize("layout", views())
@pytest.mark.parametrize(("forward", "backward"), [("multi_row", "persistent"), ("column_split", "column_split")])
@pytest.mark.parametrize("op", OPS)
def test_layouts(op, forward, backward, layout):
    given = inputs_of(op, views()[layout])
    if op == "fused_add_rms_norm":  # a residual of another layout than x, too
        given = (given[0], given[1].transpose(0, -1).contiguous().transpose(0, -1), given[2])
    results = call(op, "forward", forward, *given)
    scheme, options = OPS[op].schemes[0], {o.name: o.default for o in OPS[op].options}
    for result, like, right in zip(results, scheme.allocate(*given, **options), scheme.reference(*given, **options),
                                   strict=True):  # fmt: skip
        assert result.stride() == like.stride()
        torch.testing.assert_close(result, right, rtol=1e-2, atol=1e-2)
    shape = given[0].shape
    grads = [
        fill((32, *shape[:-1]), torch.bfloat16, "cpu", 9).movedim(0, -1),
        torch.ones((), dtype=torch.bfloat16).expand(shape),
    ]
    grads = grads[: len(OPS[op].outputs)]
    found = call(op, "backward", backward, *grads, *held(op, given, results), needs=(True,) * 3)
    for gradient, right in zip(found, gradients(op, given, grads), strict=True):
        torch.testing.assert_close(gradient, right, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("op", OPS)
def test_views_are_read_through_their_strides(op, monkeypatch):
    given = inputs_of(op, views()["five"])
    grads = [torch.ones((), dtype=torch.bfloat16).expand(given[0].shape)] * len(OPS[op].outputs)
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, **options: copies.append(self.shape))
    for forward, backward in (("multi_row", "persistent"), ("column_split", "column_split")):
        results = call(op, "forward", forward, *given)
        call(op, "backward", backward, *grads, *held(op, given, results), needs=(True,) * 3)
    assert copies == []


@pytest.mark.parametrize(("forward", "backward"), [("multi_row", "persistent"), ("column_split", "column_split")])
@pytest.mark.parametrize("op", OPS)
def test_no_rows(op, forward, backward):
    given = inputs_of(op, torch.empty(2, 0, 32, dtype=torch.bfloat16))
    results = call(op, "forward", forward, *given)
    grads = [given[0]] * len(OPS[op].outputs)
    found = call(op, "backward", backward, *grads, *held(op, given, results), needs=(True,) * 3)
    for gradient, tensor in zip(found, given, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))
