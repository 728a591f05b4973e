"""``rotary``: methods that call a rotary function call ``rope``, on their instance alone, and only where they do."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import sys
import types

import pytest
import torch
import zoo
from rotary_functions import halves as apply_rotary_pos_emb
from rotary_functions import scaled as apply_something
from rotary_functions import vision as apply_vision
from torch import nn

from liger_registry.transformers.engine import reaching, rotary, turning
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.calls import call as operate
from liger_registry.transformers.engine.rebuild import chain
from liger_registry.transformers.engine.report import Row

HERE = sys.modules[__name__]


def renamed(function):
    """A decorator like those that models put around their forward."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        kwargs.pop("old", None)
        return function(*args, **kwargs)

    return wrapper


class Attention(nn.Module):
    def __init__(self, turns=True):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(24, 24), nn.Linear(24, 8)
        self.turns = turns

    @renamed
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, 8)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        if self.turns:
            cos, sin = position_embeddings
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q @ k.transpose(-1, -2)


class Inheriting(Attention):
    pass


class Other(Attention):
    def forward(self, hidden_states, position_embeddings):
        q = self.q_proj(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        return apply_something(q, q, *position_embeddings)[0]


class Helper(Attention):
    def turned(self, q, position_embeddings):
        return apply_rotary_pos_emb(q, q, *position_embeddings)[0]

    def forward(self, hidden_states, position_embeddings):
        q = self.q_proj(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        return self.turned(q, position_embeddings)


class Sequence(nn.Module):
    """Of one sequence of any length, as in the towers of images."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, hidden_states, cu_seqlens, rotary_pos_emb=None, position_embeddings=None):
        q, k, v = self.qkv(hidden_states).reshape(hidden_states.shape[0], 3, -1, 8).permute(1, 0, 2, 3).unbind(0)
        q, k = apply_vision(q, k, *position_embeddings)
        return q @ k.transpose(-1, -2) @ v


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_states, position_embeddings):
        return sum(layer(hidden_states, position_embeddings, old=1).sum() for layer in self.layers)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Counts the calls of operations, once the functions here are known."""
    for function in (apply_rotary_pos_emb, apply_vision):
        turning.turned(function)
    counts = collections.Counter()

    def call(op, *args, **kwargs):
        counts[op] += 1
        return operate(op, *args, **kwargs)

    monkeypatch.setattr(turning, "call", call)
    return counts


def found(model, **enabled):
    items = list(rotary.find(model, {"rope": True, **enabled}))
    return [i for i in items if isinstance(i, Binding)], [i for i in items if isinstance(i, Row)]


def arguments(batch=2, tokens=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, 24, generator=generator)
    return x, (torch.randn(batch, tokens, 8, generator=generator), torch.randn(batch, tokens, 8, generator=generator))


def bound(model):
    bindings, _ = found(model)
    for binding in bindings:
        bind(binding)
    return bindings


def test_instances_call_rope_and_nothing_else_changes(launches):
    model, plain = Model(Attention(), Attention()), Model(Attention())
    before, function, forward = model(*arguments()), apply_rotary_pos_emb, Attention.forward
    bindings = bound(model)
    assert [(b.path, b.attribute, b.how) for b in bindings] == [
        ("layers.0", "forward", "apply_rotary_pos_emb turns halves"),
        ("layers.1", "forward", "apply_rotary_pos_emb turns halves"),
    ]
    assert torch.equal(model(*arguments()), before)
    assert launches == {"rope": 2}
    assert Attention.forward is forward
    assert vars(HERE)["apply_rotary_pos_emb"] is function
    plain(*arguments())
    assert launches == {"rope": 2}
    for binding in reversed(bindings):
        assert unbind(binding) == ""
    assert "forward" not in model.layers[0].__dict__
    model(*arguments())
    assert launches == {"rope": 2}


def test_instances_of_a_class_share_one_function():
    first, second = bound(Model(Attention(), Attention()))
    assert first.bound.__func__ is second.bound.__func__
    function = first.replacement.function
    assert function is second.replacement.function
    (inherited,) = bound(Model(Inheriting()))
    assert inherited.replacement.function is function
    assert len(chain(function)) == 2


def test_layers_that_turn_nothing_are_no_concern():
    bindings, rows = found(Model(Attention(), Attention(turns=False)))
    assert [b.path for b in bindings] == ["layers.0"]
    assert not rows


def test_other_functions_are_left_with_the_reason():
    bindings, rows = found(Model(Other()))
    assert not bindings
    assert [(r.op, r.module, r.applied, r.kind) for r in rows] == [("rope", "layers.0", False, "Other")]
    assert rows[0].reason == "apply_something: it turns no pairs of columns that rope knows"


def test_not_asked_for_is_not_looked_for():
    assert found(Model(Attention()), rope=False) == ([], [])


def test_methods_other_than_forward(launches):
    model = Model(Helper())
    x, tables = arguments()
    before = model.layers[0](x, tables)
    (binding,) = bound(model)
    assert binding.attribute == "turned"
    assert torch.equal(model.layers[0](x, tables), before)
    assert launches == {"rope": 1}


def test_heads_of_one_sequence(launches):
    model = Model(Sequence())
    assert len(bound(model)) == 1
    x, (cos, sin) = arguments()
    model.layers[0](x[0], None, position_embeddings=(cos[0], sin[0]))
    assert launches == {"rope": 1}


def test_what_cannot_be_tried_is_left_and_told_once_for_all_layers(monkeypatch):
    class Odd(Attention):
        def forward(self, hidden_states, table_of_contents):
            return apply_rotary_pos_emb(hidden_states, hidden_states, *table_of_contents["main"])

    tried = []
    original = reaching.ghost
    monkeypatch.setattr(reaching, "ghost", lambda *args: tried.append(args[0]) or original(*args))
    _, rows = found(Model(Odd(), Odd(), Odd()))
    assert [r.module for r in rows] == ["layers.0", "layers.1", "layers.2"]
    assert all("could not be tried: TypeError" in r.reason for r in rows)
    assert len(set(map(id, tried))) == 1


def test_code_that_looks_at_values_is_tried_with_some(launches):
    class Looking(Helper):
        def forward(self, hidden_states, position_embeddings):
            counts = hidden_states[..., 0].sum(-1).tolist()
            return super().forward(hidden_states, position_embeddings) + len(counts)

    (binding,) = found(Model(Looking()))[0]
    assert binding.attribute == "turned"


def test_the_original_is_only_looked_at(launches):
    calls = []
    model = Model(Attention())
    model.layers[0].q_proj.register_forward_hook(lambda *args: calls.append(1))
    state = {name: (id(p), p._version) for name, p in model.named_parameters()}
    keys = set(model.layers[0].__dict__)
    assert len(found(model)[0]) == 1
    assert not calls
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == state
    assert set(model.layers[0].__dict__) == keys
    bound(model)
    model(*arguments())
    assert calls == [1]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_ghost_takes_no_memory(device):
    with torch.device("meta"):
        layer = nn.Linear(10**6, 10**6)
        attention = Attention()
        attention.q_proj, attention.cached = layer, torch.ones(10**6, 10**6)
    made = reaching.ghost(attention, device)
    assert type(made) is Attention
    assert made.q_proj.weight.shape == (10**6, 10**6)
    assert made.q_proj.weight.device.type == made.cached.device.type == device
    assert made.q_proj.weight.untyped_storage().nbytes() <= 8


def test_models_on_meta_are_found():
    with torch.device("meta"):
        model = Model(Attention())
    assert len(found(model)[0]) == 1


def test_a_config_that_refuses_to_be_asked_costs_nothing():
    class Differs:
        """As those of models whose layers have heads of several widths."""

        @property
        def head_dim(self):
            raise RuntimeError("it varies from layer to layer")

    module = Attention()
    module.config = Differs()
    bindings, rows = found(Model(module))
    assert [binding.module for binding in bindings] == [module]
    assert not rows


def test_copies_and_pickles_call_rope_on_themselves(launches):
    model = Model(Attention(), Helper())
    x, tables = arguments()
    bound(model)
    before = model.layers[0](x, tables)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        launches.clear()
        forward = made.layers[0].__dict__["forward"].__self__
        assert forward.module is made.layers[0]
        assert forward.function is model.layers[0].forward.__self__.function
        assert torch.equal(made.layers[0](x, tables), before)
        assert launches == {"rope": 1}
    assert repr(model.layers[0].forward.__self__) == "<RotaryMethod of Attention.forward>"
    assert set(model.state_dict()) == set(Model(Attention(), Helper()).state_dict())


def test_a_forward_of_somebody_else_stays():
    model = Model(Attention(), Attention(), Attention())
    model.layers[0].forward = lambda *args, **kwargs: torch.zeros(())
    model.layers[1].forward = model.layers[1].forward  # put back after it was taken, which binds it
    wrapped = model.layers[2]
    wrapped._old_forward = wrapped.forward
    wrapped.forward = lambda *args, **kwargs: wrapped._old_forward(*args, **kwargs)
    bindings, rows = found(model)
    assert [(b.path, b.attribute) for b in bindings] == [("layers.1", "forward"), ("layers.2", "_old_forward")]
    assert [(r.module, r.reason) for r in rows] == [("layers.0", "Attention.forward was replaced by somebody else")]


def test_a_function_made_a_module_is_seen_through(launches, monkeypatch):
    def as_module(function):
        class Func(nn.Module):
            kernel_layer_name = "rotary_pos_emb"

            def forward(self, *args, **kwargs):
                return function(*args, **kwargs)

        return Func()

    made = as_module(apply_rotary_pos_emb)
    globals_ = {**vars(HERE), "apply_rotary_pos_emb": made}

    class Of(nn.Module):
        __init__ = Attention.__init__

    inner = chain(Attention.forward)[-1]
    assert rotary._plain(made) is apply_rotary_pos_emb
    Of.forward = types.FunctionType(inner.__code__, globals_, "forward", inner.__defaults__, inner.__closure__)
    Of.forward.__qualname__ = "Attention.forward"
    rotary._uses.clear()
    (use,) = rotary.uses(Of)
    assert list(use.functions) == ["apply_rotary_pos_emb"]
    made.forward = lambda *args: args  # a kernel of the hub was put there
    assert rotary._plain(made) is None


def test_one_graph_under_compile(monkeypatch):
    monkeypatch.setattr(turning, "call", operate)  # a count would be a guard
    model = Model(Attention(), Attention())
    x, tables = arguments()
    before = model(x, tables)
    bound(model)
    graphs = []

    def backend(graph, example):
        graphs.append(sum("rope" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, tables), before)
    assert graphs == [2]
    compiled(x, tables)
    assert len(graphs) == 1


def test_layers_compiled_one_by_one_share_their_graph(monkeypatch):
    monkeypatch.setattr(turning, "call", operate)
    model = Model(Attention(), Attention(), Attention())
    bound(model)
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in model.layers:
        torch.compile(layer, backend=backend, fullgraph=True)(*arguments())
    assert len(graphs) == 1


# -- models ----------------------------------------------------------------------------------------------------------


def generated(model, ids):
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("model_type", ["llama", "gptj", "cohere", "glm", "deepseek_v3", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_models_generate_the_same(model_type, launches):
    torch.set_num_threads(1)
    model = zoo.small_model(model_type)
    ids = zoo.inputs(model)["input_ids"]
    plain, logits = generated(model, ids), model(input_ids=ids).logits
    bindings = bound(model)
    assert len(bindings) == 2
    launches.clear()
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-6)
    assert launches["rope"] >= 2
    assert torch.equal(generated(model, ids), plain)


@pytest.mark.ci
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.filterwarnings("ignore")
def test_models_compile_to_one_graph(model_type, implementation):
    torch.set_num_threads(1)
    model = zoo.small_model(model_type, attn_implementation=implementation)
    inputs = zoo.inputs(model)
    plain = model(**inputs).loss
    bound(model)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_sections_of_three_tables_in_a_model_of_images():
    torch.set_num_threads(1)
    vision = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 2}
    text = {"rope_scaling": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    auto = "AutoModelForImageTextToText"
    model = zoo.small_model("qwen2_vl", auto=auto, vision_config=vision, text_config=text)
    bindings, rows = found(model)
    kinds = collections.Counter(type(b.module).__name__ for b in bindings)
    assert kinds["VisionAttention"] == 2
    assert kinds["Qwen2VLAttention"] == 2
    assert not rows
