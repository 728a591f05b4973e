"""The Triton implementations of rms_norm in Triton's interpreter, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_registry import Device
from liger_registry.accuracy import judge
from liger_registry.examples import STYLES, fill
from liger_registry.kernels import rms_norm, rms_norm_split
from liger_registry.ops.rms_norm import OP

DEVICE = Device.parse("interpreter")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = {"eps": 1e-6, "offset": 0.0, "casting": "llama"}
PERSISTENT = {"programs_per_unit": 1, "block_rows": 2, "num_warps": 4, "num_stages": 3}
SPLIT = {"splits": 2, "block": 512, "num_warps": 4}
GROUPS = {"block_rows": 2, "programs_per_unit": 2, "num_stages": 3}
# Each pair has one implementation of either phase, so that few runs see all of them.
PAIRS = {
    "row": (
        (rms_norm.forward_row, {"programs_per_unit": 0, "num_warps": 4}),
        (rms_norm.backward_persistent, PERSISTENT),
    ),
    "row_ahead": (
        (rms_norm.forward_row, {"programs_per_unit": 1, "num_warps": 4, "num_stages": 3}),
        (rms_norm.backward_persistent, {**PERSISTENT, "block_rows": 1, "reload_weight": True}),
    ),
    "multi_row": (
        (rms_norm.forward_multi_row, {"block_rows": 2, "programs_per_unit": 0, "num_warps": 4}),
        (rms_norm.backward_persistent, {**PERSISTENT, "block_rows": 4}),
    ),
    "multi_row_ahead": (
        (rms_norm.forward_multi_row, {"block_rows": 4, "programs_per_unit": 1, "num_warps": 4, "num_stages": 3}),
        (rms_norm.backward_persistent, {**PERSISTENT, "programs_per_unit": 2}),
    ),
    "column_split": (
        (rms_norm_split.forward_column_split, SPLIT),
        (rms_norm_split.backward_column_split, {**SPLIT, **GROUPS}),
    ),
    "column_split_narrow": (
        (rms_norm_split.forward_column_split, {**SPLIT, "splits": 4, "block": 16}),
        (rms_norm_split.backward_column_split, {**SPLIT, **GROUPS, "splits": 4, "block": 16, "block_rows": 1}),
    ),
}


def formula(x, weight, dy, options, dtype):
    """``y, rstd, grad_x, grad_weight`` of the contract's formula computed in a dtype, or in those of the tensors."""
    x, weight, dy = (
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(i < 2)
        for i, t in enumerate((x, weight, dy))
    )
    y, rstd = OP.schemes[0].reference(x, weight, **options)
    gradients = torch.autograd.grad(y, [t for t in (x, weight) if t is not None], dy.to(y.dtype))
    return y.detach(), rstd.detach(), gradients[0], gradients[1] if weight is not None else None


def check(pair, x, weight, options, dy=None):
    """Both phases of a pair against the accuracy rule, and against writing to what is not theirs."""
    (forward, config), (backward, backward_config) = PAIRS[pair]
    empty = OP.schemes[0].allocate(x, weight, **options)
    dy = fill(tuple(x.shape), empty[0].dtype, "cpu", 2) if dy is None else dy
    before = [None if t is None else t.clone() for t in (x, weight, dy)]
    y, rstd = forward(x, weight, device=DEVICE, **options, **config)
    dx, dweight = backward(dy, x, weight, rstd, device=DEVICE, needs=(True, True), **options, **backward_config)
    exact, own = formula(x, weight, dy, options, torch.float64), formula(x, weight, dy, options, None)
    sizes = OP.magnitude(tuple(None if t is None else t.double() for t in (x, weight)), (dy.double(),), options)
    rows, hidden = x.shape[:-1].numel(), x.shape[-1]
    named = {"y": (y, 1), "rstd": (rstd, hidden), "grad_x": (dx, hidden), "grad_weight": (dweight, rows)}
    for (name, (result, reduced)), right, formulas in zip(named.items(), exact, own, strict=True):
        if right is None:
            assert result is None
            continue
        verdict = judge(name, result, right, formulas, sizes[name], reduced)
        # One column: the gradient of x cancels to eps * rstd^3, so only its distance in units of its terms means much.
        cancels = name == "grad_x" and hidden == 1 and verdict.worst <= verdict.worst_limit and not verdict.problem
        assert verdict.passed or cancels, f"{pair} {tuple(x.shape)}: {verdict}"
    for result, like in zip((y, rstd, dx), (*empty, empty[0]), strict=True):
        assert result.stride() == like.stride()
    for tensor, copy in zip((x, weight, dy), before, strict=True):
        assert tensor is None or torch.equal(tensor, copy)


def weight_for(hidden, dtype):
    return fill((hidden,), dtype, "cpu", 1, scale=0.25) + 1


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS)
def test_accuracy(pair, dtype, casting):
    for rows, hidden in [(5, 41), (3, 1)] if "narrow" in pair else [(5, 41), (1, 3), (5, 1), (9, 128)]:
        x = fill((rows, hidden), DTYPES[dtype], "cpu", 0)
        weighted = ((weight_for(hidden, x.dtype), 0.0), (weight_for(hidden, x.dtype), 1.0))
        for weight, offset in weighted if casting != "none" else ((None, 0.0), weighted[0]):
            check(pair, x, weight, {"eps": 1e-6, "offset": offset, "casting": casting})


@pytest.mark.parametrize("pair", ["row", "multi_row", "column_split"])
def test_wide_rows_whose_width_is_no_power_of_two(pair):
    x = fill((3, 1536), torch.bfloat16, "cpu", 0, "tail")
    check(pair, x, weight_for(1536, x.dtype), OPTIONS)


def test_a_width_that_no_single_program_holds():
    x = fill((1, 70000), torch.bfloat16, "cpu", 0, "tail")
    weight = weight_for(70000, x.dtype)
    config = {"splits": 2, "block": 4096, "num_warps": 8}
    options = {"device": DEVICE, **OPTIONS}
    y, rstd = rms_norm_split.forward_column_split(x, weight, **options, **config)
    assert torch.equal(y, OP.reference(x, weight))
    dx, dweight = rms_norm_split.backward_column_split(
        y, x, weight, rstd, needs=(True, True), **options, **config, **GROUPS
    )
    exact = formula(x, weight, y, OPTIONS, torch.float64)
    torch.testing.assert_close(dx.double(), exact[2], rtol=1e-2, atol=1e-2 * float(exact[2].abs().mean()))
    torch.testing.assert_close(dweight.double(), exact[3], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pair", ["multi_row_ahead", "column_split_narrow"])
def test_styles(pair, style):
    x = fill((17, 96), torch.bfloat16, "cpu", 0, style)
    check(pair, x, weight_for(96, x.dtype), {**OPTIONS, "eps": 1e-5})


@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize("pair", ["row", "multi_row", "column_split"])
def test_mixed_dtypes_promote_as_the_family_does(pair, casting):
    for x_dtype, w_dtype in [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16")]:
        x = fill((3, 48), DTYPES[x_dtype], "cpu", 0)
        check(pair, x, weight_for(48, DTYPES[w_dtype]), {**OPTIONS, "offset": 1.0, "casting": casting})


def views():
    def made(*shape):
        return fill(shape, torch.bfloat16, "cpu", 0)

    return {
        "heads": made(2, 5, 3, 16).transpose(1, 2),
        "columns": made(16, 6).t(),
        "slice": made(6, 40)[:, 3:19],
        "slice_of_batches": made(3, 4, 40)[1:, ::2, 3:19],
        "expanded": made(1, 16).expand(7, 16),
        "five": made(2, 2, 3, 2, 16).permute(2, 0, 3, 1, 4),
        "six": made(2, 1, 2, 2, 3, 2, 16).permute(5, 3, 0, 4, 2, 1, 6),
        "vector": made(16),
        "one_column": made(5, 8)[:, :1],
    }


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("pair", ["multi_row_ahead", "column_split"])
def test_layouts(pair, name):
    x = views()[name]
    weight = weight_for(x.shape[-1], x.dtype)
    gradients = [
        None,
        torch.ones((), dtype=x.dtype).expand(x.shape),
        fill((x.shape[-1], *x.shape[:-1]), x.dtype, "cpu", 3).movedim(0, -1),
    ]
    for dy in gradients:
        check(pair, x, weight, OPTIONS, dy)


def vectors(vector):
    """The vector's values in memory that is not contiguous, and one of its elements repeated; beside them is NaN."""
    spread = torch.full((2 * len(vector) + 1,), float("nan"), dtype=vector.dtype)[1:]
    spread[::2] = vector
    column = torch.full((len(vector), 3), float("nan"), dtype=vector.dtype)
    column[:, 1] = vector
    return {"slice": spread[::2], "column": column[:, 1], "expanded": vector[3:4].expand(vector.shape)}


@pytest.mark.parametrize("name", ["slice", "column", "expanded"])
@pytest.mark.parametrize("pair", PAIRS)
def test_vectors_that_are_not_contiguous(pair, name):
    x = fill((5, 48), torch.bfloat16, "cpu", 0)
    weight = vectors(weight_for(48, x.dtype))[name]
    assert not weight.is_contiguous()
    check(pair, x, weight, OPTIONS)
    # A forward that is not ours may have saved its statistics anywhere.
    (forward, config), (backward, backward_config) = PAIRS[pair]
    _, rstd = forward(x, weight, device=DEVICE, **OPTIONS, **config)
    right, found = (
        backward(x, x, weight, r, device=DEVICE, needs=(True, True), **OPTIONS, **backward_config)
        for r in (rstd, vectors(rstd)["column"])
    )
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))


def test_views_are_read_through_their_strides(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, **options: copies.append(self.shape))
    x = views()["five"]
    for pair in ("multi_row", "column_split"):
        (forward, config), (backward, backward_config) = PAIRS[pair]
        _, rstd = forward(x, None, device=DEVICE, **OPTIONS, **config)
        dy = torch.ones((), dtype=x.dtype).expand(x.shape)
        backward(dy, x, None, rstd, device=DEVICE, needs=(True, False), **OPTIONS, **backward_config)
    assert copies == []


@pytest.mark.parametrize("pair", PAIRS)
def test_only_what_is_needed_is_computed(pair):
    backward, config = PAIRS[pair][1]
    x, weight = fill((5, 16), torch.float32, "cpu", 0), weight_for(16, torch.float32)
    _, rstd = rms_norm.forward_row(x, weight, device=DEVICE, programs_per_unit=0, num_warps=4, **OPTIONS)
    all_of_it = backward(x, x, weight, rstd, device=DEVICE, needs=(True, True), **OPTIONS, **config)
    for needs in itertools.product([True, False], repeat=2):
        found = backward(x, x, weight, rstd, device=DEVICE, needs=needs, **OPTIONS, **config)
        for gradient, need, whole in zip(found, needs, all_of_it, strict=True):
            assert (gradient is None) != need
            assert not need or torch.equal(gradient, whole)


@pytest.mark.parametrize("pair", PAIRS)
def test_no_rows(pair):
    (forward, config), (backward, backward_config) = PAIRS[pair]
    x, weight = torch.empty(2, 0, 16, dtype=torch.bfloat16), weight_for(16, torch.bfloat16)
    y, rstd = forward(x, weight, device=DEVICE, **OPTIONS, **config)
    dx, dweight = backward(x, x, weight, rstd, device=DEVICE, needs=(True, True), **OPTIONS, **backward_config)
    assert (y.shape, rstd.shape, dx.shape) == (x.shape, (0,), x.shape)
    assert torch.equal(dweight, torch.zeros_like(weight))


@pytest.mark.parametrize("pair", PAIRS)
def test_scratch_is_never_taken_to_be_zero(pair):
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN, so that whatever is not written shows
    x = fill((3, 40), torch.float32, "cpu", 0)
    check(pair, x, weight_for(40, x.dtype), OPTIONS)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_forward_has_the_bits_of_the_familys_formula(dtype):
    # Quarters up to 4: their squares add up exactly in any order, so that a bit can only differ by a rounding.
    x = (torch.randint(-16, 17, (9, 128)) / 4).to(DTYPES[dtype])
    weight = weight_for(128, x.dtype)
    for casting, offset in itertools.product(["llama", "gemma", "none"], [0.0, 1.0]):
        y, _ = rms_norm.forward_multi_row(
            x,
            weight,
            device=DEVICE,
            eps=1e-6,
            offset=offset,
            casting=casting,
            block_rows=4,
            programs_per_unit=0,
            num_warps=4,
        )
        assert torch.equal(y, OP.reference(x, weight, offset=offset, casting=casting))
