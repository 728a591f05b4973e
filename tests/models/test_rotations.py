"""``rotations``, ``linear`` and ``turning``: functions that ``rope`` computes are found, and others are not."""

from __future__ import annotations

import collections

import pytest
import rotary_functions as written
import torch
from rotary_functions import (
    FUNCTIONS,
    back_in_its_dtype,
    complex_tables,
    halves,
    indexed,
    keys_or_none,
    one_at_a_time,
    partial,
    plain_tables,
    rotate_half,
    sections,
    vision,
)

from liger_registry.transformers.engine import turning
from liger_registry.transformers.engine.linear import inputs_of
from liger_registry.transformers.engine.rotations import NotRotary, recognise
from liger_registry.transformers.engine.turning import turned

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def named(function):
    return function.__name__


@pytest.fixture
def launches(monkeypatch):
    """Counts the calls of operations."""
    counts = collections.Counter()
    original = turning.call

    def call(op, *args, **kwargs):
        counts[op] += 1
        return original(op, *args, **kwargs)

    monkeypatch.setattr(turning, "call", call)
    return counts


def random(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


# -- recognition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_its_pairs_are_found(function):
    assert recognise(function).pairs == FUNCTIONS[function]


def test_its_roundings_are_found():
    assert set(recognise(halves).wide.values()) == {False}
    back = recognise(back_in_its_dtype).wide
    assert (back[BF16, BF16], back[BF16, FP32], back[FP32, BF16]) == (False, True, False)
    once = recognise(vision).wide
    assert once[BF16, BF16] is once[FP16, BF16] is True
    assert (FP64, FP64) not in once


def test_layouts_are_found_where_no_parameter_tells():
    assert dict(recognise(vision).layouts) == {(4, 3): -2, (3, 2): -2}
    assert dict(recognise(one_at_a_time).layouts) == {(4, 3): -2}
    assert dict(recognise(plain_tables).layouts) == {(4, 2): -3, (4, 4): -3, (3, 2): -3}
    assert not recognise(halves).layouts


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (written.scaled, "no pairs"),
        (written.forgets_a_term, "no cos and sin"),
        (written.exchanges, "no pairs"),
        (written.constant_width, "constant 64"),
        (written.small_scale, "constant 1.0001"),
        (written.rounds_otherwise, None),
        (written.on_lengths, "whether q.shape"),
        (written.random_too, "dropout"),
        (written.writes, "mul_"),
        (written.uses_a_global, "SCALE"),
        (written.three, "q, k, v"),
        (written.decorated_inside, "decorates one"),
        (rotate_half, "no cos and sin"),
        (torch.no_grad()(halves), "wrapped"),
        (len, "builtin"),
    ],
)
def test_an_edited_function_is_another(function, reason):
    if reason is None:
        # Where it rounds like rope it is served, and nowhere else.
        assert {pair for pair in recognise(function).wide if BF16 in pair} <= {(FP32, BF16)}
        return
    with pytest.raises(NotRotary, match=reason):
        recognise(function)


def test_used_parameters_are_told_from_others():
    assert inputs_of(halves) == ("q", "k", "cos", "sin", "unsqueeze_dim")


def test_what_gives_other_gradients_is_not_used(monkeypatch):
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    original = turning.call
    monkeypatch.setattr(turning, "call", lambda *a, **o: tuple(Halved.apply(x) for x in original(*a, **o)))

    def fresh(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    with pytest.raises(NotRotary, match="gradients"):
        turned(fresh)


# -- calls -----------------------------------------------------------------------------------------------------------

D, C, B, T = 12, 8, 2, 5


def heads(count, dtype=FP32, dim=1, seed=0):
    x = random(B, T, count, D, dtype=dtype, seed=seed)
    return x.transpose(1, 2) if dim == 1 else x


def tables(columns, dtype=FP32, lead=(B, T)):
    return random(*lead, columns, dtype=dtype, seed=5), random(*lead, columns, dtype=dtype, seed=6)


def derived(function, args, kwargs):
    """What a call returns, and gradients of the floating tensors of four dimensions, or of a sequence of heads."""
    copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in (*args, *kwargs.values())]
    leaves = [x.requires_grad_() for x in copies[:2] if isinstance(x, torch.Tensor) and _is_heads(x)]
    results = function(*copies[: len(args)], **dict(zip(kwargs, copies[len(args) :], strict=True)))
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    upstream = [random(*x.shape, dtype=x.dtype, seed=9) for x in results]
    return results, torch.autograd.grad(results, leaves, upstream)


def _is_heads(x):
    return x.dim() == 4 or (x.dim() == 3 and x.shape[0] == T)


def check(function, *args, **kwargs):
    """Ours gives what the function gives: values bit for bit, dtypes, shapes, and gradients to a few roundings."""
    (expected, upstream), (found, ours) = derived(function, args, kwargs), derived(turned(function), args, kwargs)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    for a, b in zip(upstream, ours, strict=True):
        tolerance = 1e-5 if a.dtype == FP32 else 3e-2
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("batch", [(B, T), (1, T), (T,)])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, BF16)])
def test_ranks_dims_and_dtypes(launches, dim, batch, dtypes):
    for function in (halves, back_in_its_dtype, partial):
        turned(function)
    launches.clear()
    cos, sin = tables(D, dtypes[1], batch)
    q, k = heads(7, dtypes[0], dim), heads(3, dtypes[0], dim, seed=1)
    check(halves, q, k, cos, sin, unsqueeze_dim=dim - (len(batch) == 1))
    check(back_in_its_dtype, q, k, cos, sin, dim - (len(batch) == 1))
    check(partial, q, k, *(t[..., :C] for t in (cos, sin)), unsqueeze_dim=dim - (len(batch) == 1))
    assert launches["rope"] == 3


def test_positional_keyword_and_unused_arguments(launches):
    turned(halves)
    launches.clear()
    cos, sin = tables(D)
    q, k = heads(3), heads(1)
    ids = torch.arange(T)[None]
    check(halves, q, k, cos, sin)
    check(halves, q, k, cos, sin, ids)
    check(halves, q, k, cos, sin, None, 1)
    check(halves, q=q, k=k, sin=sin, cos=cos, position_ids=ids)
    check(halves, heads(3, dim=2), heads(1, dim=2), unsqueeze_dim=2, sin=sin, cos=cos)
    check(halves, q, k, cos, sin, unsqueeze_dim=-3)
    assert launches["rope"] == 6


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f not in (indexed, sections, complex_tables)], ids=named)
def test_each_spelling(launches, function, dtype):
    pairs, rotation = FUNCTIONS[function], turned(function).rotation
    launches.clear()
    columns = D // 2 if pairs.half and not pairs.first else C if pairs.partial else D
    cos, sin = tables(columns, dtype)
    dim = 2 if -2 in rotation.layouts.values() else 1
    if function is plain_tables:
        cos, sin = cos[:, None], sin[:, None]
    given = dict(zip(rotation.roles.heads, (heads(3, dtype, dim), heads(5, dtype, dim)), strict=False))
    check(function, **given, cos=cos, sin=sin)
    assert launches["rope"] == 1


def test_heads_of_one_sequence(launches):
    turned(vision)
    launches.clear()
    cos, sin = tables(D, FP32, (T,))
    check(vision, heads(3, BF16, 2)[0], heads(3, BF16, 2)[1], cos, sin)
    assert launches["rope"] == 1


def test_keys_that_are_none(launches):
    turned(keys_or_none)
    launches.clear()
    cos, sin = tables(D)
    check(keys_or_none, heads(3), cos=cos, sin=sin)
    check(keys_or_none, heads(3), None, cos, sin)
    check(keys_or_none, heads(3), heads(2), cos, sin)
    assert launches["rope"] == 3


def test_tables_by_positions_and_by_sections(launches):
    for function in (indexed, sections):
        turned(function)
    launches.clear()
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    check(indexed, heads(3), heads(2), *tables(D, FP32, (11,)), ids)
    check(sections, heads(3), heads(2), *tables(D, FP32, (3, B, T)), [1, 2, 3])
    assert launches["rope"] == 2


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_complex_tables(launches, dtype):
    ours = turned(complex_tables)
    launches.clear()
    q, k = heads(3, dtype, 2), heads(2, dtype, 2)
    freqs = torch.complex(*tables(D // 2))
    for a, b in zip(complex_tables(q, k, freqs), ours(q, k, freqs), strict=True):
        torch.testing.assert_close(b, a, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert launches["rope"] == 1
    for a, b in zip(complex_tables(q, k, freqs.real), ours(q, k, freqs.real), strict=True):
        assert torch.equal(a, b)  # real ones, as of a model cast to a real dtype, are the function's affair
    assert launches["rope"] == 1


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q.double(), k.double(), cos, sin),
        lambda q, k, cos, sin: (q, k, cos.double(), sin.double()),
        lambda q, k, cos, sin: (q.bfloat16(), k, cos, sin),
        lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),
        lambda q, k, cos, sin: (q, k[:1], cos[:1], sin[:1]),
        lambda q, k, cos, sin: (q[:1], k[:1], cos, sin),
        lambda q, k, cos, sin: (q, k, cos[:, :1], sin[:, :1]),
        lambda q, k, cos, sin: (q, k, cos[..., :1], sin[..., :1]),
        lambda q, k, cos, sin: (q.as_subclass(Sub), k, cos, sin),
    ],
)
def test_what_rope_does_not_take_is_left_to_the_function(launches, change):
    ours = turned(halves)
    launches.clear()
    args = change(heads(3), heads(2), *tables(D))
    for a, b in zip(halves(*args), ours(*args), strict=True):
        assert torch.equal(a, b)
        assert type(a) is type(b)
    assert launches["rope"] == 0


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, 2, 3, 4, 5, 6, 7), {}),
        ((1, 2, 3, 4), {"q": 1}),
        ((1, 2, 3, 4), {"other": 1}),
    ],
)
def test_wrong_calls_raise_what_the_function_raises(args, kwargs):
    with pytest.raises(TypeError, match="halves"):
        turned(halves)(*args, **kwargs)


def test_sizes_that_do_not_fit_raise_what_the_function_raises():
    with pytest.raises(RuntimeError, match="size of tensor"):
        turned(halves)(heads(3), heads(2), *tables(C))
