"""The PyTorch implementations of rms_norm against float64, and what the model's own formula gives in their dtype."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_registry import Device
from liger_registry.accuracy import judge
from liger_registry.examples import STYLES, fill
from liger_registry.ops.rms_norm import OP
from liger_registry.portable import rms_norm as portable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
FORWARD = {
    "eager": portable.forward_eager,
    "functional": portable.forward_functional,
    "row_chunks": lambda *a, **k: portable.forward_row_chunks(*a, **k, slab_rows=4),
}
BACKWARD = {
    "eager": portable.backward_eager,
    "row_chunks": lambda *a, **k: portable.backward_row_chunks(*a, **k, slab_rows=4),
}
CPU = Device.parse("cpu")


def formula(x, weight, dy, options, dtype):
    """``y, rstd, grad_x, grad_weight`` of the contract's formula computed in a dtype, or in those of the tensors."""
    x, weight, dy = (
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(i < 2)
        for i, t in enumerate((x, weight, dy))
    )
    y, rstd = OP.schemes[0].reference(x, weight, **options)
    gradients = torch.autograd.grad(y, [t for t in (x, weight) if t is not None], dy.to(y.dtype))
    return y.detach(), rstd.detach(), gradients[0], gradients[1] if weight is not None else None


def check(forward, backward, x, weight, dy, options):
    """Both phases of an implementation against the accuracy rule, and against writing to what is not theirs."""
    before = [None if t is None else t.clone() for t in (x, weight, dy)]
    exact, own = formula(x, weight, dy, options, torch.float64), formula(x, weight, dy, options, None)
    y, rstd = forward(x, weight, device=CPU, **options)
    dx, dweight = backward(dy, x, weight, rstd, device=CPU, needs=(True, True), **options)
    doubles = tuple(None if t is None else t.double() for t in (x, weight))
    sizes = OP.magnitude(doubles, (dy.double(),), options)
    named = {"y": y, "rstd": rstd, "grad_x": dx, "grad_weight": dweight}
    rows, hidden = x.shape[:-1].numel(), x.shape[-1]
    reduced = {"y": 1, "rstd": hidden, "grad_x": hidden, "grad_weight": rows}
    for (name, result), right, formulas in zip(named.items(), exact, own, strict=True):
        if right is None:
            assert result is None
            continue
        verdict = judge(name, result, right, formulas, sizes[name], reduced[name])
        # One column: the gradient of x cancels to eps * rstd^3, so only its distance in units of its terms means much.
        cancels = name == "grad_x" and hidden == 1 and verdict.worst <= verdict.worst_limit and not verdict.problem
        assert verdict.passed or cancels, str(verdict)
    empty = OP.schemes[0].allocate(x, weight, **options)
    for result, like in zip((y, rstd, dx), (*empty, empty[0]), strict=True):
        assert result.stride() == like.stride()
    for tensor, copy in zip((x, weight, dy), before, strict=True):
        assert tensor is None or torch.equal(tensor, copy)


def inputs(shape, dtype, style="random", weight_dtype=None, weight=True):
    x = fill(shape, dtype, "cpu", 0, style)
    w = fill(shape[-1:], weight_dtype or dtype, "cpu", 1, scale=0.25) + 1 if weight else None
    return x, w


def gradient(x, weight, casting):
    promoted = x.dtype if weight is None or casting != "llama" else torch.promote_types(x.dtype, weight.dtype)
    return fill(tuple(x.shape), promoted, "cpu", 2)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARD)
def test_accuracy(name, dtype, casting):
    backward = BACKWARD.get(name, portable.backward_eager)
    for (rows, hidden), weight, offset in itertools.product([(261, 41), (5, 1536), (1, 1)], [True, False], [0.0, 1.0]):
        x, w = inputs((rows, hidden), DTYPES[dtype], weight=weight)
        options = {"eps": 1e-6, "offset": offset, "casting": casting}
        check(FORWARD[name], backward, x, w, gradient(x, w, casting), options)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", FORWARD)
def test_styles(name, style):
    x, w = inputs((64, 96), torch.bfloat16, style)
    options = {"eps": 1e-5, "offset": 0.0, "casting": "llama"}
    check(FORWARD[name], BACKWARD.get(name, portable.backward_eager), x, w, gradient(x, w, "llama"), options)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("name", FORWARD)
def test_mixed_dtypes_promote_as_the_family_does(name, casting):
    for x_dtype, w_dtype in [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16")]:
        x, w = inputs((9, 48), DTYPES[x_dtype], weight_dtype=DTYPES[w_dtype])
        options = {"eps": 1e-6, "offset": 0.0, "casting": casting}
        check(FORWARD[name], BACKWARD.get(name, portable.backward_eager), x, w, gradient(x, w, casting), options)


@pytest.mark.parametrize("name", FORWARD)
def test_layouts(name):
    backward = BACKWARD.get(name, portable.backward_eager)
    options = {"eps": 1e-6, "offset": 0.0, "casting": "llama"}
    views = [
        fill((2, 5, 3, 16), torch.bfloat16, "cpu", 0).transpose(1, 2),
        fill((16, 12), torch.bfloat16, "cpu", 0).t(),
        fill((6, 40), torch.bfloat16, "cpu", 0)[:, 3:19],
        fill((1, 16), torch.bfloat16, "cpu", 0).expand(7, 16),
        fill((16,), torch.bfloat16, "cpu", 0),
        fill((2, 2, 3, 2, 3, 16), torch.bfloat16, "cpu", 0).permute(4, 2, 0, 3, 1, 5),
    ]
    weight = fill((16,), torch.bfloat16, "cpu", 1) + 1
    for x in views:
        check(FORWARD[name], backward, x, weight, gradient(x, weight, "llama"), options)
        check(FORWARD[name], backward, x, weight, torch.ones((), dtype=x.dtype).expand(x.shape), options)


@pytest.mark.parametrize("name", BACKWARD)
def test_only_what_is_needed_is_computed(name):
    x, w = inputs((8, 16), torch.float32)
    _, rstd = portable.forward_eager(x, w, device=CPU, eps=1e-6, offset=0.0, casting="llama")
    for needs in itertools.product([True, False], repeat=2):
        found = BACKWARD[name](x, x, w, rstd, device=CPU, needs=needs, eps=1e-6, offset=0.0, casting="llama")
        assert tuple(g is not None for g in found) == needs


@pytest.mark.parametrize("name", FORWARD)
def test_no_rows(name):
    x, w = inputs((0, 16), torch.bfloat16)
    options = {"device": CPU, "eps": 1e-6, "offset": 0.0, "casting": "llama"}
    y, rstd = FORWARD[name](x, w, **options)
    dx, dweight = BACKWARD.get(name, portable.backward_eager)(x, x, w, rstd, needs=(True, True), **options)
    assert (y.shape, rstd.shape, dx.shape) == ((0, 16), (0,), (0, 16))
    assert torch.equal(dweight, torch.zeros_like(w))


@pytest.fixture
def _fused_backward(monkeypatch):
    """Torch's formula of the fused backward, whose kernel only GPUs have."""
    from torch._decomp import decomposition_table

    fused = decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]

    def call(dy, x, shape, rstd, weight, wanted):
        assert len({t.dtype for t in (dy, x, weight) if t is not None}) == 1, "the kernel takes one dtype"
        return fused(dy, x, list(shape), rstd, weight, wanted)

    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm_backward", call)


@pytest.mark.skipif(not portable.FUSED, reason="this torch has no fused kernel")
@pytest.mark.usefixtures("_fused_backward")
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_backward(dtype, casting):
    for weight, offset in itertools.product([True, False], [0.0, 1.0]):
        x, w = inputs((37, 48), DTYPES[dtype], weight=weight)
        options = {"eps": 1e-6, "offset": offset, "casting": casting}
        dy = gradient(x, w, casting)
        check(portable.forward_eager, portable.backward_functional, x, w, dy, options)
        _, rstd = portable.forward_eager(x, w, device=CPU, **options)
        for needs in itertools.product([True, False], repeat=2):
            found = portable.backward_functional(dy, x, w, rstd, device=CPU, needs=needs, **options)
            assert tuple(g is not None for g in found) == (needs[0], needs[1] and weight)
    empty = torch.empty(0, 48, dtype=DTYPES[dtype])
    _, w = inputs((1, 48), DTYPES[dtype])
    rstd = empty.new_empty(0, dtype=torch.promote_types(empty.dtype, torch.float32))
    dx, dweight = portable.backward_functional(empty, empty, w, rstd, device=CPU, needs=(True, True), **options)
    assert dx.shape == (0, 48)
    assert torch.equal(dweight, torch.zeros_like(w))


@pytest.mark.usefixtures("_fused_backward")
def test_the_fused_backward_keeps_the_layout_of_x():
    x = fill((16, 12), torch.bfloat16, "cpu", 0).t()
    weight = fill((16,), torch.bfloat16, "cpu", 1) + 1
    options = {"eps": 1e-6, "offset": 0.0, "casting": "llama"}
    for view in (x, fill((2, 5, 3, 16), torch.bfloat16, "cpu", 0).transpose(1, 2)):
        check(
            portable.forward_eager, portable.backward_functional, view, weight, gradient(view, weight, "llama"), options
        )


def test_llama_and_none_differ_in_bits():
    x, w = inputs((64, 64), torch.bfloat16)
    options = {"device": CPU, "eps": 1e-6, "offset": 0.0}
    for forward in FORWARD.values():
        twice, once = (forward(x, w, casting=casting, **options)[0] for casting in ("llama", "none"))
        assert not torch.equal(twice, once)
        assert torch.equal(twice, OP.reference(x, w, casting="llama"))
        assert torch.equal(once, OP.reference(x, w, casting="none"))
