"""``reading``: code of many spellings becomes one expression, and what is not understood becomes none."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_registry.transformers.engine import expressions as ex
from liger_registry.transformers.engine.expressions import Expr, const
from liger_registry.transformers.engine.matching import hole, match
from liger_registry.transformers.engine.reading import Unreadable, read_function, read_method
from liger_registry.transformers.engine.rounding import Unrounded, rounded

SCALE = 3.0
SILU = nn.SiLU()
PARTIAL = functools.partial(F.silu, inplace=False)


def read(function, **constants):
    return read_function(function, constants).result


def squares():
    def method(x):
        return x.pow(2)

    def star(x):
        return x**2

    def product(x):
        return x * x

    def torch_square(x):
        return torch.square(x)

    def torch_pow(x):
        return torch.pow(x, 2)

    def signed(x):
        return (-x) * (-x)

    return method, star, product, torch_square, torch_pow, signed


def casts():
    def to(x):
        return x.to(torch.float32)

    def named(x):
        return x.to(dtype=torch.float32)

    def short(x):
        return x.float()

    def twice(x):
        y = x.float()
        return y.to(y.dtype)

    return to, named, short, twice


def means():
    def method(x):
        return x.mean(-1, keepdim=True)

    def named(x):
        return x.mean(dim=-1, keepdim=True)

    def function(x):
        return torch.mean(x, axis=-1, keepdim=True)

    return method, named, function


def halves():
    def chunk(x):
        a, b = x.chunk(2, dim=-1)
        return b, a

    def torch_chunk(x):
        a, b = torch.chunk(x, 2, -1)
        return b, a

    def slices(x):
        return x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]

    def split(x):
        a, b = torch.split(x, x.size(-1) // 2, dim=-1)
        return b, a

    def helper(x):
        def_b, def_a = slices(x)
        return def_b, def_a

    return chunk, torch_chunk, slices, split, helper


def differences():
    def minus(x, y):
        return x - y

    def plus(x, y):
        return -y + x

    def torch_sub(x, y):
        return torch.sub(x, y)

    return minus, plus, torch_sub


def activations():
    def function(x):
        return F.silu(x)

    def module(x):
        return SILU(x)

    def partial(x):
        return PARTIAL(x)

    return function, module, partial


@pytest.mark.parametrize("spellings", [squares, casts, means, halves, differences, activations])
def test_spellings_of_one_thing_are_one_expression(spellings):
    first, *others = [read(function) for function in spellings()]
    for other in others:
        assert other == first
        assert hash(other) == hash(first)


def test_casts_are_part_of_what_is_read():
    def with_cast(x):
        return x.float().pow(2).to(x.dtype)

    def without(x):
        return x.pow(2)

    assert read(with_cast) != read(without)
    assert str(read(with_cast)) == "cast((cast(x, float32) ** 2), dtype(x))"


class Norm(nn.Module):
    def __init__(self, eps=1e-6, scaled=True, names=("a", "b")):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps, self.scaled, self.names = eps, scaled, names
        self.register_buffer("shift", None)
        self.inner = nn.Linear(4, 4)

    @property
    def half_eps(self):
        return self.eps / 2

    @functools.cached_property
    def third_of_eps(self):
        return self.eps / 3

    def helper(self, x, factor=1.0):
        return x * torch.rsqrt(x + self.eps) * factor

    def forward(self, hidden, gate=None):
        out = self.helper(hidden)
        if gate is not None:
            out = out * gate
        if self.scaled:
            out = self.weight * out
        elif self.shift is not None:
            raise ValueError
        if self.training:
            out = self.inner(out)
        return out


class Tall(Norm):
    def forward(self, hidden):
        return super().forward(hidden) + self.half_eps


def test_a_method_knows_what_its_instance_has():
    reading = read_method(Norm(eps=0.5))
    assert reading.parameters == ("hidden",)
    condition, trained, plain = reading.result.args
    assert (reading.result.op, condition) == ("if", Expr("flag", (), "training"))
    assert trained == Expr("call", (plain,), "inner")
    (weight,) = {node.value for node in plain.walk() if node.op == "attr"}
    assert weight == "weight"
    assert {node.path: node.value for node in plain.walk() if node.path} == {"eps": 0.5}
    assert (
        read_method(Norm(scaled=False)).result.args[2] == plain.replace(const(0.5), const(1e-6)).args[1 - where(plain)]
    )


class Taller(Norm):
    def forward(self, hidden):
        return hidden + self.third_of_eps


def test_reading_leaves_nothing_in_the_module():
    module = Taller(eps=0.75)
    before = dict(module.__dict__)
    assert str(read_method(module).result) == "(0.25 + hidden)"
    assert module.__dict__ == before
    assert module.third_of_eps == 0.25
    assert str(read_method(module).result) == "(0.25 + hidden)"


def where(product):
    """The place of the weight in a product."""
    return [arg.op for arg in product.args].index("attr")


def test_parameters_with_defaults_are_symbols_on_demand():
    assert read_method(Norm(), symbols=("gate",)).parameters == ("hidden", "gate")

    def function(x, dim=1):
        return x.unsqueeze(dim)

    assert read(function).args[1] == const(1)
    assert read(function, dim=2).args[1] == const(2)
    assert read_function(function, symbols=("dim",)).result.args[1] == Expr("param", (), "dim")


def test_supers_and_properties_are_read_in():
    result = read_method(Tall(eps=0.5)).result
    assert result.op == "add"
    assert const(0.25) in result.args


def test_readings_are_shared_by_what_is_alike_and_by_nothing_else():
    one, other, third = Norm(), Norm(), Norm(eps=1e-5)
    assert read_method(one) is read_method(other)
    assert read_method(third).result != read_method(one).result
    other.shift = torch.ones(1)
    assert read_method(other) is read_method(one)  # not looked at, where it is scaled
    assert read_method(Norm(scaled=False)).result != read_method(one).result


def test_a_method_put_in_another_ones_place_is_read_anew(monkeypatch):
    before = read_method(Norm()).result
    monkeypatch.setattr(Norm, "helper", lambda self, x: x)
    with pytest.raises(Unreadable, match="lambda"):
        read_method(Norm())
    monkeypatch.undo()

    def helper(self, x):
        return x * self.eps

    monkeypatch.setattr(Norm, "helper", helper)
    assert read_method(Norm()).result != before


def test_branches_keep_both_sides_and_raising_is_a_guard():
    def function(x):
        if x.size(-1) != 7:
            raise ValueError
        y = x
        if x.dtype in (torch.float16, torch.bfloat16):
            y = x.float()
        if y.ndim == 3:
            return y + 1
        return y

    reading = read_function(function)
    assert [str(guard) for guard in reading.guards] == ["not(eq(size(x, -1), 7))"]
    assert (reading.result.op, reading.result.args[1].op) == ("if", "add")
    x = Expr("param", (), "x")
    half = rounded(reading.result.args[2], {x: torch.bfloat16})
    assert half == ex.cast(x, const(torch.float32))
    assert rounded(reading.result.args[2], {x: torch.float32}) == x


def test_returns_within_known_branches_go_on_after_them():
    def function(x, known=True):
        if known:
            y = x
            if x.ndim == 2:
                return y
        return x * 2

    assert str(read(function)) == "(x if eq(dim(x), 2) else (2 * x))"


def test_autocast_is_assumed_off_where_the_code_switches_it_off():
    def function(x):
        if torch.is_autocast_enabled():
            x = x.to(torch.get_autocast_dtype("cuda"))
        with torch.autocast(device_type=x.device.type, enabled=False):
            return F.layer_norm(x, (4,), None, None, 1e-5)

    reading = read_function(function)
    assert reading.assumes == {"autocast is off"}
    assert reading.result.op == "layer_norm"


def test_shapes_tuples_and_comprehensions():
    def function(q, k):
        *rest, last = q.shape
        a, b = (t.view(*rest, last // 2, 2) for t in (q, k))
        parts = [p * n for n, p in enumerate(a.unbind(-1) if False else (a, b))]
        return torch.cat(parts, dim=-1), q.shape[:-1]

    result = read(function)
    assert result.op == "tuple"
    assert result.args[0].op == "cat"
    assert len(result.args[0].args[0].args) == 2


def unreadable():
    def loop(x):
        for _ in range(2):
            x = x + 1
        return x

    def in_place(x):
        x += 1
        return x

    def method_in_place(x):
        return x.mul_(2)

    def out(x):
        return torch.add(x, 1, out=x)

    def inplace(x):
        return F.relu(x, inplace=True)

    def writes(x):
        x[0] = 1
        return x

    def unknown(x):
        return print(x)

    def no_grad(x):
        with torch.no_grad():
            return x * 2

    def detached(x):
        return x.data * 2

    @functools.wraps(loop)
    def wrapped(x):
        return loop(x)

    def calls_wrapped(x):
        return wrapped(x)

    return loop, in_place, method_in_place, out, inplace, writes, unknown, no_grad, detached, calls_wrapped


@pytest.mark.parametrize("function", unreadable(), ids=lambda function: function.__name__)
def test_what_is_not_understood_is_unreadable(function):
    with pytest.raises(Unreadable) as raised:
        read_function(function)
    assert raised.value.reason


def test_unknown_functions_equal_nothing_but_themselves():
    def one(x):
        return torch.erfinv(x) + x.cumsum(-1)

    def other(x):
        return torch.erfinv(x) + x.cumsum(0)

    assert read(one) == read(one)
    assert read(one) != read(other)


def test_constants_of_the_file_are_read():
    def function(x):
        return x * SCALE

    assert read(function) == ex.mul(Expr("param", (), "x"), const(3))


def test_formulas_with_holes():
    x, y = Expr("param", (), "x"), Expr("param", (), "y")
    formula = ex.mul(hole("a"), ex.add(hole("eps", "const"), hole("a")))
    assert match(formula, ex.mul(ex.add(x, const(0.5)), x)) == {"a": x, "eps": const(0.5)}
    assert match(formula, ex.mul(ex.add(y, const(0.5)), x)) is None
    assert match(formula, ex.mul(ex.add(x, y), x)) is None


def test_roundings_that_are_none_are_dropped_and_promotions_put_in():
    x, w = Expr("param", (), "x"), Expr("attr", (), "weight")
    late = ex.cast(ex.mul(w, ex.cast(x, const(torch.float32))), ex.dtype_of(x))
    early = ex.mul(w, ex.cast(ex.cast(x, const(torch.float32)), ex.dtype_of(x)))

    def both(*dtypes):
        known = dict(zip((x, w), dtypes, strict=True))
        return rounded(late, known), rounded(early, known)

    one, other = both(torch.float32, torch.float32)
    assert one == other == ex.mul(x, w)
    one, other = both(torch.bfloat16, torch.bfloat16)
    assert other == ex.mul(x, w)  # there and back is nothing
    assert one == ex.cast(ex.mul(*(ex.cast(t, const(torch.float32)) for t in (w, x))), const(torch.bfloat16))
    with pytest.raises(Unrounded):
        rounded(late, {x: torch.float32})


def test_roots_are_one_in_float32_alone():
    v = Expr("param", (), "v")
    spellings = [Expr("rsqrt", (v,)), ex.div(const(1), Expr("sqrt", (v,))), ex.power(v, const(-0.5))]
    assert len({rounded(s, {v: torch.float32}) for s in spellings}) == 1
    assert len({rounded(s, {v: torch.bfloat16}) for s in spellings}) == 3
