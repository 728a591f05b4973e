"""``mlps``: gated products are found by what they compute, in whatever code, and the rest of the code stays itself."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from gated_layers import (
    HIDDEN,
    Around,
    Functional,
    Indexed,
    Looped,
    Multiplied,
    Named,
    NewGELU,
    OwnSiLU,
    Packed,
    PackedOtherwise,
    Split,
    SquaredReLU,
    Swapped,
    UpFirst,
    UsedTwice,
    Widened,
    WrappedGELU,
)
from torch import nn

from liger_registry.transformers.engine import mlps
from liger_registry.transformers.engine.activations import activation_of
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.gating import GatedForward
from liger_registry.transformers.engine.mlps import find
from liger_registry.transformers.engine.reading import Unreadable
from liger_registry.transformers.engine.rebuild import Shared

EVERY = {"swiglu": True, "geglu": True, "relu_squared": True}
BF16, FP32 = torch.bfloat16, torch.float32


FIXED = Around()
SHAPES = {
    Split: False,
    Swapped: False,
    Named: False,
    Functional: False,
    Around: False,
    Widened: False,
    Multiplied: False,
    Packed: True,
    PackedOtherwise: True,
    UpFirst: False,
    UsedTwice: False,
    Indexed: False,
    Looped: True,
}


def found(module, enabled=EVERY):
    return list(find(nn.ModuleDict({"mlp": module}), enabled))


def bound(module):
    (binding,) = found(module)
    assert isinstance(binding, Binding), binding
    bind(binding)
    return binding


class Counting:
    """Counts the operations of a bound module, and whether gate and up came in one tensor."""

    def __init__(self, module):
        before = module.__dict__["forward"].__self__
        product = copy.copy(before.product)
        self.operate, self.calls = product.operate, []
        product.operate = self
        module.__dict__["forward"] = GatedForward(module, before.method, product)

    def __call__(self, op, gate, up, **options):
        self.calls.append((op, up is None, options))
        return self.operate(op, gate, up, **options)


def given(dtype=FP32):
    return torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_every_shape_gives_values_and_gradients_of_its_class(kind, dtype):
    module = kind().to(dtype).train()
    plain = copy.deepcopy(module)
    binding = bound(module)
    counting = Counting(module)
    results = []
    for one in (module, plain):
        torch.manual_seed(7)
        x = given(dtype)
        y = one(x)
        gradients = torch.autograd.grad(y.float().square().sum(), [x, *one.parameters()])
        results.append((y, gradients))
    (y, gradients), (expected, wanted) = results
    torch.testing.assert_close(y, expected, rtol=1e-6 if dtype == FP32 else 0, atol=1e-6 if dtype == FP32 else 0)
    close = 1e-5 if dtype == FP32 else 2e-2
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close * float(other.abs().max()))
    assert {(op, packed) for op, packed, _ in counting.calls} == {("swiglu", SHAPES[kind])}
    assert ("of one tensor" in binding.how) == SHAPES[kind]


def test_a_multiplier_goes_into_the_operation():
    module = Multiplied()
    bound(module)
    counting = Counting(module)
    module(given())
    assert counting.calls == [("swiglu", False, {"gate_multiplier": 0.7})]


ACTIVATIONS = [
    (nn.SiLU(), "swiglu", {}),
    (OwnSiLU(), "swiglu", {}),
    (F.silu, "swiglu", {}),
    (nn.GELU(), "geglu", {"approximate": "none"}),
    (nn.GELU("tanh"), "geglu", {"approximate": "tanh"}),
    (WrappedGELU(), "geglu", {"approximate": "tanh"}),
    (F.gelu, "geglu", {"approximate": "none"}),
    (functools.partial(F.gelu, approximate="tanh"), "geglu", {"approximate": "tanh"}),
    (SquaredReLU(), "relu_squared", {}),
]


@pytest.mark.parametrize(("act", "op", "options"), ACTIVATIONS)
def test_activations_are_what_they_compute(act, op, options):
    activation = activation_of(act)
    assert (activation.op, dict(activation.options)) == (op, options)
    module = Split(act)
    plain = copy.deepcopy(module)
    for binding in found(module):
        assert isinstance(binding, Binding)
        bind(binding)
        assert binding.op == op
    torch.testing.assert_close(module(given()), plain(given()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("act", [NewGELU(), nn.Sigmoid(), nn.ReLU(), nn.Mish(), nn.Linear(4, 4), torch.tanh, 3])
def test_other_activations_are_none(act):
    with pytest.raises(Unreadable):
        activation_of(act)


def test_a_gate_that_rounds_after_every_step_is_left_alone_and_says_so():
    (row,) = found(Split(NewGELU()))
    assert (row.applied, row.op) == (False, "geglu")
    assert "activation NewGELU is" in row.reason


def test_other_products_give_nothing():
    class Sigmoid(Split):
        def forward(self, x):
            return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))

    class OfArguments(Split):
        def forward(self, x, gate):
            return self.down_proj(x * self.act_fn(gate))

    class Plain(Split):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)))

    class Mixer(Split):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(HIDDEN, HIDDEN, 2)

    for kind in (Sigmoid, OfArguments, Plain, Mixer):
        assert found(kind()) == []
    assert found(Split(), {"swiglu": False, "geglu": True}) == []


def test_one_more_factor_stays_a_factor():
    class More(Split):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)

    module, plain = More(), More()
    plain.load_state_dict(module.state_dict())
    bound(module)
    torch.testing.assert_close(module(given()), plain(given()))


def test_layers_are_called_as_modules():
    module = Split()
    bound(module)
    seen = []
    for name, child in module.named_children():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    module(given())
    assert seen == ["gate_proj", "up_proj", "act_fn", "down_proj"]  # hooks of the activation bring it back
    swapped = Swapped()
    bound(swapped)
    for name, child in swapped.named_children():
        child.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    seen.clear()
    swapped(given())
    assert seen[:2] == ["up_proj", "gate_proj"]


def test_hooks_on_the_activation_keep_it():
    module = Split()
    module.act_fn.register_forward_hook(lambda *_: None)
    (row,) = found(module)
    assert "hooks" in row.reason


def test_what_the_operation_cannot_take_is_computed_as_it_stands():
    module = Split()
    plain = copy.deepcopy(module)
    bound(module)
    counting = Counting(module)
    x = given().detach()
    torch.testing.assert_close(module.double()(x.double()), plain.double()(x.double()))
    module.float(), plain.float()
    torch.testing.assert_close(torch.func.vmap(module)(x), plain(x))
    module.act_fn, plain.act_fn = nn.Tanh(), nn.Tanh()
    torch.testing.assert_close(module(x), plain(x))
    assert counting.calls == []


def test_a_forward_with_two_gates_is_left_alone():
    class Two(Split):
        def __init__(self):
            super().__init__()
            self.other = nn.GELU()

        def forward(self, x):
            a = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            b = self.other(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(a + b)

    (row,) = found(Two())
    assert row.reason == "it has several gates: self.act_fn, self.other"


def test_the_probe_has_the_last_word(monkeypatch):
    monkeypatch.setattr(mlps, "_probed", Shared())
    monkeypatch.setattr(mlps, "reference", lambda op, gate, up, **_: F.silu(gate) * up * 1.01)
    (row,) = found(Split())
    assert "a probe on random numbers in float32 differs in values" in row.reason


def test_squared_relus_are_replaced_in_their_own_module():
    module = Split(SquaredReLU())
    plain = copy.deepcopy(module)
    (binding,) = found(module)
    assert (binding.op, binding.path) == ("relu_squared", "mlp.act_fn")
    bind(binding)
    torch.testing.assert_close(module(given()), plain(given()))
    calls = []
    module.act_fn.__dict__["forward"].__self__.operate = lambda op, x: calls.append(op) or torch.relu(x).square()
    module(given())
    module.double()(given().double())
    assert calls == ["relu_squared"]
    assert unbind(binding) == ""


def test_copies_and_pickles_serve_their_own_module():
    model = nn.Sequential(Split())
    bound(model[0])
    x = given()
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied[0].__dict__["forward"].__self__.module is copied[0]
        torch.testing.assert_close(copied(x), expected)
        with torch.no_grad():
            copied[0].up_proj.weight.zero_()
        assert not copied(x).any()
    torch.testing.assert_close(model(x), expected)


def test_a_copied_partial_is_still_the_activation():
    module = Split(functools.partial(F.gelu, approximate="tanh"))
    bound(module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        counting = Counting(copied)
        copied(given())
        assert [op for op, *_ in counting.calls] == ["geglu"]


def test_finding_draws_none_of_the_callers_random_numbers(monkeypatch):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    monkeypatch.setattr(mlps, "_probed", Shared())
    module = copy.deepcopy(FIXED).train()
    assert found(module)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_functions_of_the_class_and_of_torch_are_never_touched():
    before = (Split.forward, F.silu, nn.SiLU.forward)
    module = Split()
    binding = bound(module)
    assert (Split.forward, F.silu, nn.SiLU.forward) == before
    unbind(binding)
    assert "forward" not in module.__dict__
    assert list(module.state_dict()) == list(Split().state_dict())


def test_a_replaced_forward_is_left_alone():
    module = Split()
    module.forward = lambda x: x
    (row,) = found(module)
    assert row.reason == "its forward was replaced on this instance"


def test_large_mlps_on_the_meta_device_are_found():
    with torch.device("meta"):
        module = Split()
        module.gate_proj, module.up_proj = nn.Linear(4096, 11008), nn.Linear(4096, 11008)
        module.down_proj = nn.Linear(11008, 4096)
    (binding,) = found(module)
    assert isinstance(binding, Binding)


def test_a_compiled_mlp_is_one_graph():
    module = Split()
    plain = copy.deepcopy(module)
    bound(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(given()), plain(given()))
