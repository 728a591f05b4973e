"""``residual``: additions and norms become one call where the code shows that they can, and round as they did."""

from __future__ import annotations

import collections
import copy
import pickle

import pytest
import torch
import zoo
from torch import nn

from liger_registry.transformers.engine import norms, residual
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.calls import call as operate
from liger_registry.transformers.engine.rebuild import chain
from liger_registry.transformers.engine.report import Row

WIDTH = 48


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.4, 1.7, WIDTH))
        self.eps = 1e-5

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Layer(nn.Module):
    """As of Llama."""

    def __init__(self, norm=RMSNorm):
        super().__init__()
        self.input_norm, self.post_norm = norm(), norm()
        self.attention, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.input_norm(hidden_states)
        hidden_states = self.attention(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class Scaled(Layer):
    def forward(self, hidden_states):
        attended = self.attention(self.input_norm(hidden_states))
        total = hidden_states + attended * 0.5
        normed = self.post_norm(total)
        return total + self.mlp(normed)


class Twice(Layer):
    def forward(self, x):
        h = x + self.attention(x)
        y = self.input_norm(h)
        h = self.mlp(y) + h
        again = h
        z = self.post_norm(again)
        return again - z


class Between(Layer):
    def forward(self, x):
        h = x + self.attention(x)
        h.mul_(2)
        return self.post_norm(h)


class Conditional(Layer):
    def forward(self, x):
        if x.shape[0] > 1:
            return x
        h = x + self.attention(x)
        h = self.post_norm(h)
        return h


class Assigned(Layer):
    def forward(self, x):
        h = x + self.attention(x)
        other = self.mlp(x)
        h = self.post_norm(h)
        return h + other


class InPlace(Layer):
    def forward(self, x):
        h = self.attention(x)
        h += x
        h = self.post_norm(h)
        return h


class OtherNorm(Layer):
    def forward(self, x):
        h = x + self.attention(x)
        y = self.post_norm(x)
        return h + y


class WithMore(Layer):
    def forward(self, x):
        h = x + self.attention(x)
        h = self.post_norm(h, 2)
        return h


FUSED = {Layer: ["post_norm"], Scaled: ["post_norm"], Twice: ["input_norm", "post_norm"]}
LEFT = [Between, Conditional, Assigned, InPlace, OtherNorm, WithMore, nn.Linear, nn.Sequential]


@pytest.fixture
def launches(monkeypatch):
    counts = collections.Counter()

    def call(op, *args, **kwargs):
        counts[op] += 1
        return operate(op, *args, **kwargs)

    for module in (residual, norms):
        monkeypatch.setattr(module, "call", call)
    return counts


def bound(model, norms_too=True):
    bindings = []
    for find in (norms.find, residual.find) if norms_too else (residual.find,):
        for item in find(model, {"rms_norm": True, "layer_norm": True, residual.OP: True}):
            if isinstance(item, Binding):
                bind(item)
                bindings.append(item)
    return [b for b in bindings if b.op == residual.OP]


def heads_on(model, dtype):
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y))
    return y.detach(), [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_sum_and_norm_are_one_call_and_the_same(launches, kind, dtype):
    torch.manual_seed(0)
    model = kind().to(dtype)
    y, gradients = heads_on(model, dtype)
    (binding,) = bound(model)
    assert binding.how == f"its forward adds, then calls {' and '.join(FUSED[kind])}"
    found, ours = heads_on(model, dtype)
    assert launches[residual.OP] == len(FUSED[kind])
    assert torch.equal(found, y)
    for a, b in zip(gradients, ours, strict=True):
        assert (a - b).float().norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * a.float().norm()


@pytest.mark.parametrize("kind", LEFT)
def test_code_that_does_something_between_is_left(kind):
    assert residual.sites(kind) == ()


def test_instances_alone_change_and_change_back(launches):
    model, plain = Layer(), Layer()
    forward, x = Layer.forward, torch.randn(3, WIDTH)
    (binding,) = bound(model)
    model(x), plain(x)
    assert launches[residual.OP] == 1
    assert Layer.forward is forward
    assert len(chain(binding.replacement.function)) == 1
    assert unbind(binding) == ""
    model(x)
    assert launches[residual.OP] == 1
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.post_norm.register_forward_hook(lambda module, args, y: y * 2),
        lambda layer: layer.post_norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda layer: layer.post_norm.__dict__.update(forward=lambda x: x),
        lambda layer: setattr(layer, "post_norm", nn.Identity()),
    ],
)
def test_a_norm_that_changes_later_is_called_as_it_is(launches, change):
    torch.manual_seed(0)
    model, plain = Layer(), Layer()
    plain.load_state_dict(model.state_dict())
    bound(model)
    for layer in (model, plain):
        change(layer)
    x = torch.randn(3, WIDTH)
    assert torch.equal(model(x), plain(x))
    assert launches[residual.OP] == 0


def test_hooks_on_every_module_run(launches):
    model = Layer()
    bound(model)
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: called.append(module))
    try:
        model(torch.randn(3, WIDTH))
    finally:
        handle.remove()
    assert model.post_norm in called
    assert launches[residual.OP] == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(3, WIDTH), torch.randn(1, WIDTH)),
        (torch.randn(3, WIDTH), torch.randn(3, WIDTH).bfloat16()),
        (torch.randn(3, WIDTH).double(), torch.randn(3, WIDTH).double()),
    ],
)
def test_what_the_operation_does_not_take_is_added_first(launches, one, other):
    model = Layer()
    bound(model)
    launches.clear()
    normed, total = residual.add_norm(model.post_norm, one, other)
    assert torch.equal(total, one + other)
    assert torch.equal(normed, RMSNorm.forward(model.post_norm, one + other))
    assert launches[residual.OP] == 0


def test_layers_whose_norms_stay_their_own_are_told():
    def rows(model):
        return [item for item in residual.find(model, {residual.OP: True}) if isinstance(item, Row)]

    assert [r.reason for r in rows(Layer())] == ["post_norm is no rms_norm of the registry's"]
    model = Layer()
    model.post_norm.register_forward_hook(lambda *args: None)
    assert [r.reason for r in rows(model)] == ["post_norm has hooks"]
    assert rows(Layer(lambda: nn.LayerNorm(WIDTH))) == []
    assert list(residual.find(Layer(), {residual.OP: False})) == []
    model = Layer()
    bound(model)
    other = Layer()
    (binding,) = bound(other)
    unbind(binding)
    other.forward = lambda x: x
    assert [r.reason for r in rows(other)] == ["Layer.forward was replaced by somebody else"]


def test_copies_and_pickles(launches):
    model = Layer()
    bound(model)
    x = torch.randn(3, WIDTH)
    y = model(x)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        launches.clear()
        assert made.__dict__["forward"].__self__.module is made
        assert torch.equal(made(x), y)
        assert launches[residual.OP] == 1


def test_one_graph_under_compile():
    model = Layer()
    bound(model)
    x = torch.randn(3, WIDTH)
    y = model(x)
    graphs = []

    def backend(graph, example):
        graphs.append(sum("add_rms_norm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), y)
    assert graphs == [1]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "granite"])
@pytest.mark.filterwarnings("ignore")
def test_models_are_the_same(launches, model_type):
    torch.set_num_threads(1)
    model = zoo.small_model(model_type)
    inputs = zoo.inputs(model)
    plain = model(**inputs)
    assert len(bound(model)) == 2
    launches.clear()
    patched = model(**inputs)
    assert launches[residual.OP] == 2
    torch.testing.assert_close(patched.loss, plain.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(patched.logits, plain.logits, rtol=1e-5, atol=1e-5)
