"""``norms``: every family's formula is found in its own roundings, and an edited one is left alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from norm_layers import (
    WIDTH,
    Bare,
    Checked,
    CohereNorm,
    Gemma3nNorm,
    GemmaNorm,
    HeliumNorm,
    LlamaNorm,
    LlamaOtherwise,
    OffsetInItsDtype,
    OffsetLayerNorm,
    OlmoNorm,
    SuperLayerNorm,
    T5Norm,
    WideLayerNorm,
)
from torch import nn

from liger_registry.transformers.engine import norms
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.norms import NormForward, find, formula_of
from liger_registry.transformers.engine.reading import Unreadable
from liger_registry.transformers.engine.rebuild import Shared

EVERY = {"rms_norm": True, "layer_norm": True}
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


FAMILIES = {
    LlamaNorm: ("rms_norm", "llama", 0.0),
    LlamaOtherwise: ("rms_norm", "llama", 0.0),
    GemmaNorm: ("rms_norm", "gemma", 1.0),
    OlmoNorm: ("rms_norm", "gemma", 0.0),
    HeliumNorm: ("rms_norm", "gemma", 0.0),
    Gemma3nNorm: ("rms_norm", "gemma", 0.0),
    T5Norm: ("rms_norm", "llama", 0.0),
    Checked: ("rms_norm", "llama", 0.0),
    CohereNorm: ("layer_norm", "", 0.0),
}


def torch_norms():
    return {
        "LayerNorm": nn.LayerNorm(WIDTH),
        "LayerNorm without bias": nn.LayerNorm(WIDTH, bias=False),
        "LayerNorm without weight": nn.LayerNorm(WIDTH, elementwise_affine=False),
        "RMSNorm": nn.RMSNorm(WIDTH, eps=1e-6),
        "RMSNorm without weight": nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False),
        "its offset": OffsetLayerNorm(WIDTH),
        "widened": WideLayerNorm(WIDTH, elementwise_affine=False),
        "by super": SuperLayerNorm(WIDTH),
        "Gemma 3n's without scale": Gemma3nNorm(with_scale=False),
    }


def everything():
    return {**{kind.__name__: kind() for kind in FAMILIES}, **torch_norms()}


def found(module, enabled=EVERY):
    return list(find(nn.ModuleDict({"norm": module}), enabled))


def bound(module):
    (binding,) = found(module)
    assert isinstance(binding, Binding), binding
    bind(binding)
    return binding


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_families_are_told_apart(kind):
    formula = formula_of(kind())
    op, casting, offset = FAMILIES[kind]
    assert (formula.op, formula.eps, formula.offset) == (op, 1e-6, offset)
    assert dict(formula.castings)[BF16, BF16] == casting
    assert dict(formula.castings)[FP32, FP32] in (casting, "llama", "gemma")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", everything())
def test_values_are_those_of_the_class_to_the_bit(name, dtype):
    module = everything()[name].to(dtype)
    x = torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = module(x)
    bound(module)
    torch.testing.assert_close(
        module(x), expected, rtol=1e-6 if dtype == FP32 else 0, atol=1e-6 if dtype == FP32 else 0
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", everything())
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_mixed_dtypes_give_what_the_class_gives(name, dtype, x_dtype):
    module = everything()[name].to(dtype)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(x_dtype)
    try:
        expected = module(x)
    except RuntimeError:
        return  # the class takes no such pair
    bound(module)
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)


def edits():
    class OtherEps(LlamaNorm):
        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps * 2 + x)).to(x.dtype)

    class OneMore(LlamaNorm):
        def forward(self, x):
            return super().forward(x) * 0.5

    class Cubed(LlamaNorm):
        def _norm(self, x):
            return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps)

        def forward(self, x):
            return self.weight * self._norm(x.float()).to(x.dtype)

    class OtherDimension(LlamaNorm):
        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + self.eps)).to(x.dtype)

    class EpsOutside(LlamaNorm):
        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)) + self.eps)).to(x.dtype)

    class Gated(LlamaNorm):
        def forward(self, x, gate=None):
            return super().forward(x) * F.silu(gate.float())

    class Summed(LlamaNorm):
        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    class Loops(LlamaNorm):
        def forward(self, x):
            for _ in range(1):
                x = super().forward(x)
            return x

    return OtherEps, OneMore, Cubed, OtherDimension, EpsOutside, Gated, Summed, Loops


@pytest.mark.parametrize("kind", edits(), ids=lambda kind: kind.__name__)
def test_an_edited_forward_is_left_alone_and_says_why(kind):
    module = type(f"{kind.__name__}RMSNorm", (kind,), {})()
    (row,) = found(module)
    assert not row.applied
    assert row.reason
    assert row.op == "rms_norm"
    assert "forward" not in module.__dict__


def test_another_eps_or_a_missing_cast_is_another_formula():
    class Other(LlamaNorm):
        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 2 * self.eps)).to(x.dtype)

    class Less(LlamaNorm):
        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))

    assert formula_of(Other()).eps == 2e-6
    served = {pair for pair, _ in formula_of(Less()).castings}
    assert (FP32, FP32) in served
    assert (BF16, BF16) not in served  # it returns float32


@pytest.mark.parametrize("kind", [Bare, OffsetInItsDtype], ids=lambda kind: kind.__name__)
def test_what_rounds_elsewhere_in_bf16_is_served_in_float32_alone(kind):
    (binding,) = found(kind())
    assert isinstance(binding, Binding)
    (row,) = found(kind().to(BF16))
    assert "in bfloat16 it rounds in other places than rms_norm" in row.reason
    module = kind()
    bind(binding)
    binding.module.to(BF16)  # converted after it was bound
    module.to(BF16)
    x = torch.randn(5, WIDTH).to(BF16)
    torch.testing.assert_close(binding.module(x), module(x), rtol=0, atol=0)


def test_the_probe_has_the_last_word(monkeypatch):
    monkeypatch.setattr(norms, "_probed", Shared())
    monkeypatch.setattr(norms, "reference", lambda op, x, weight, **options: 1.01 * x * weight)
    (row,) = found(LlamaNorm())
    assert "a probe on random numbers in float32 differs in values" in row.reason


class Counting:
    def __init__(self, module):
        self.calls, self.operate = [], module.__dict__["forward"].__self__.operate
        module.__dict__["forward"].__self__.operate = self

    def __call__(self, op, *args, **options):
        self.calls.append(op)
        return self.operate(op, *args, **options)


def test_what_the_operation_cannot_take_goes_to_the_class():
    module, plain = LlamaNorm(), LlamaNorm()
    bound(module)
    counting = Counting(module)
    x = torch.randn(3, WIDTH)
    module(x)
    assert counting.calls == ["rms_norm"]
    for given in (x.double(), x.to_sparse().to_dense().double()):
        torch.testing.assert_close(module(given), plain(given))
    torch.testing.assert_close(module(hidden_states=x), plain(x))
    torch.testing.assert_close(torch.func.vmap(module)(x), plain(x))
    with pytest.raises(TypeError):
        module(x, x)
    with pytest.raises(RuntimeError):
        module(torch.randn(3, WIDTH + 1))
    assert counting.calls == ["rms_norm"]


# PyTorch's own, once a process, where it finds its fused norm not to apply.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_serves_what_it_leaves_alone():
    x = torch.randn(3, WIDTH)
    for module, counts in ((LlamaNorm(), 2), (nn.LayerNorm(WIDTH), 1), (nn.RMSNorm(WIDTH, eps=1e-6), 1)):
        plain = copy.deepcopy(module)
        bound(module)
        counting = Counting(module)
        with torch.autocast("cpu", dtype=BF16):
            for given in (x, x.bfloat16()):
                one, other = module(given), plain(given)
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert len(counting.calls) == counts


def test_gradients_reach_x_and_the_weight():
    module, plain = GemmaNorm(), GemmaNorm()
    bound(module)
    for norm in (module, plain):
        norm.x = torch.linspace(-2, 2, 3 * WIDTH).reshape(3, WIDTH).requires_grad_()
        norm(norm.x).square().sum().backward()
    torch.testing.assert_close(module.x.grad, plain.x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-5)


def test_copies_and_pickles_serve_their_own_module():
    model = nn.Sequential(LlamaNorm())
    bound(model[0])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        replacement = copied[0].__dict__["forward"].__self__
        assert isinstance(replacement, NormForward)
        assert replacement.module is copied[0]
        with torch.no_grad():
            copied[0].weight.zero_()
        x = torch.randn(2, WIDTH)
        assert not copied(x).any()
        assert model(x).any()
    assert list(model.state_dict()) == ["0.weight"]


def test_a_weight_put_in_its_place_later_is_used():
    module = LlamaNorm()
    binding = bound(module)
    module.weight = nn.Parameter(torch.zeros(WIDTH))
    assert not module(torch.randn(2, WIDTH)).any()
    assert unbind(binding) == ""
    assert "forward" not in module.__dict__


def test_modules_that_would_not_run_their_own_code_are_left_alone():
    replaced = LlamaNorm()
    replaced.forward = lambda x: x
    (row,) = found(replaced)
    assert row.reason == "its forward was replaced on this instance"
    quantised = LlamaNorm()
    quantised.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)
    (row,) = found(quantised)
    assert row.reason == "its weight is in int8"
    several = nn.LayerNorm((3, WIDTH))
    (row,) = found(several)
    assert "several dimensions" in row.reason or "no known formula" in row.reason
    parametrised = nn.utils.parametrizations.weight_norm(nn.LayerNorm(WIDTH), "weight", dim=None)
    (row,) = found(parametrised)
    assert row.reason


def test_what_is_not_wanted_or_no_norm_gives_nothing():
    assert found(LlamaNorm(), {"rms_norm": False, "layer_norm": True}) == []
    for module in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Dropout(), nn.Embedding(4, 4), nn.ReLU()):
        assert found(module) == []


def test_a_norm_of_two_dimensional_weight_is_no_known_one():
    module = CohereNorm()
    module.weight = nn.Parameter(torch.ones(2, WIDTH))
    with pytest.raises(Unreadable, match="more than one dimension"):
        formula_of(module)


def test_the_report_says_how_it_was_read():
    (binding,) = found(GemmaNorm())
    assert binding.row.reason == "reads as rms_norm: eps 1e-06, casting gemma, offset 1"
    assert binding.row.module == "norm"


def test_norms_on_the_meta_device_are_found():
    with torch.device("meta"):
        module = LlamaNorm()
    (binding,) = found(module)
    assert isinstance(binding, Binding)


def test_a_compiled_norm_is_one_graph():
    module, plain = LlamaNorm(), LlamaNorm()
    bound(module)
    x = torch.randn(3, WIDTH)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


class DerivedEps(LlamaNorm):
    """A norm whose eps is made of two attributes."""

    def __init__(self):
        super().__init__()
        self.times = 2.0

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps * self.times)
        return self.weight * wide.to(hidden_states.dtype)


@pytest.mark.parametrize("make", [*everything(), DerivedEps], ids=lambda v: str(getattr(v, "__name__", v)))
@pytest.mark.parametrize("new", [0.5, 1, -1e-3])
def test_an_eps_that_was_changed_later_is_used(make, new):
    module = make() if isinstance(make, type) else everything()[make]
    names = [name for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    if make is DerivedEps:
        names = ["eps", "times"]
    assert names
    for name in names:
        plain, patched = copy.deepcopy(module), copy.deepcopy(module)
        bound(patched)
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(patched(x), plain(x))
        for norm in (plain, patched):
            setattr(norm, name, new)
        torch.testing.assert_close(patched(x), plain(x), equal_nan=True)


def test_a_changed_eps_is_still_served():
    module = LlamaNorm()
    bound(module)
    counting = Counting(module)
    module.eps = 0.5
    module(torch.randn(2, WIDTH))
    assert len(counting.calls) == 1
