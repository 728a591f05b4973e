"""``qk``: norms of queries and keys and the rotation become one call where the code shows that they can."""

from __future__ import annotations

import collections
import copy
import pickle

import pytest
import torch
import zoo
from rotary_functions import half_tables as apply_half_tables
from rotary_functions import halves as apply_rotary_pos_emb
from torch import nn

from liger_registry.transformers.engine import norms, qk, rotary, turning
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.calls import call as operate

WIDTH, HEAD = 24, 8


class RMSNorm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.4, 1.7, HEAD))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Normalises before it transposes."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, n * HEAD) for n in (3, 1, 1))
        self.q_norm, self.k_norm = RMSNorm(), RMSNorm(eps)

    def forward(self, hidden_states, position_embeddings):
        shape = (*hidden_states.shape[:-1], -1, HEAD)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        return query @ key.transpose(-1, -2) @ value


class Behind(Attention):
    """Transposes before it normalises."""

    def forward(self, hidden_states, position_embeddings):
        shape = (*hidden_states.shape[:-1], -1, HEAD)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        query = self.q_norm(query)
        key = self.k_norm(key)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin=sin)
        return query @ key.transpose(-1, -2)


class Reads(Attention):
    def forward(self, hidden_states, position_embeddings):
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        size = query.square().mean()
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query.mean() + key.mean() + size


class Writes(Attention):
    def forward(self, hidden_states, position_embeddings):
        projected = self.q_proj(hidden_states).unflatten(-1, (-1, HEAD))
        query = self.q_norm(projected).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        other = projected.zero_()
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query.mean() + key.mean() + other.mean()


class Sometimes(Attention):
    def forward(self, hidden_states, position_embeddings):
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query.mean() + key.mean()


class OneNorm(Attention):
    def forward(self, hidden_states, position_embeddings):
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        key = self.k_proj(hidden_states).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query.mean() + key.mean()


class OtherPairs(Attention):
    def forward(self, hidden_states, position_embeddings):
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_half_tables(query, key, cos[..., :4], sin[..., :4])
        return query.mean() + key.mean()


class Other(Attention):
    def forward(self, hidden_states, position_embeddings):
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, HEAD))).transpose(-3, -2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query.mean() + key.mean()


LEFT = [Reads, Writes, Sometimes, OneNorm, OtherPairs, Other]


@pytest.fixture
def launches(monkeypatch):
    for function in (apply_rotary_pos_emb, apply_half_tables):
        turning.turned(function)
    counts = collections.Counter()

    def call(op, *args, **kwargs):
        counts[op] += 1
        return operate(op, *args, **kwargs)

    for module in (qk, turning, norms):
        monkeypatch.setattr(module, "call", call)
    return counts


EVERY = {"rms_norm": True, "layer_norm": True, "rope": True, qk.OP: True}


def bound(model, **enabled):
    items = []
    for find in (norms.find, qk.find, rotary.find):
        for item in find(model, {**EVERY, **enabled}):
            if isinstance(item, Binding):
                bind(item)
            items.append(item)
    return items


def arguments(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(2, 5, n, generator=generator).to(dtype) for n in (WIDTH, HEAD, HEAD))
    return x.requires_grad_(), (cos, sin)


def run(model, dtype=torch.float32):
    x, tables = arguments(dtype)
    model.zero_grad()
    y = model(x, tables)
    y.sum().backward()
    return y.detach(), [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Attention, Behind])
def test_norms_and_rotation_are_one_call_and_the_same(launches, kind, dtype):
    torch.manual_seed(0)
    model = kind().to(dtype)
    y, gradients = run(model, dtype)
    items = bound(model)
    (binding,) = [i for i in items if isinstance(i, Binding) and i.op == qk.OP]
    assert binding.how == "its forward calls q_norm and k_norm, then apply_rotary_pos_emb"
    assert [(i.op, i.applied) for i in items if not isinstance(i, Binding)] == [("rope", True)]
    found, ours = run(model, dtype)
    assert launches == {qk.OP: 1}
    torch.testing.assert_close(found, y, rtol=0, atol=0)
    for a, b in zip(gradients, ours, strict=True):
        assert (a - b).float().norm() <= (1e-5 if dtype == torch.float32 else 3e-2) * a.float().norm()


@pytest.mark.parametrize("kind", LEFT)
def test_code_that_could_tell_is_left_and_turned_alone(launches, kind):
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        y = model(*arguments())
    assert qk.norms(kind) == ()
    assert [i.op for i in bound(model) if isinstance(i, Binding)] == ["rms_norm", "rms_norm", "rope"]
    with torch.no_grad():
        assert torch.equal(model(*arguments()), y)
    assert launches["rope"] == 1
    assert launches[qk.OP] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.q_norm.register_forward_hook(lambda module, args, y: y * 2),
        lambda model: model.k_norm.__dict__.update(forward=lambda x: x),
        lambda model: setattr(model, "q_norm", nn.Identity()),
    ],
)
def test_a_norm_that_changes_later_is_called_as_it_is(launches, change):
    torch.manual_seed(0)
    model = Attention()
    plain = copy.deepcopy(model)
    bound(model)
    for each in (model, plain):
        change(each)
    x, tables = arguments()
    assert torch.equal(model(x, tables), plain(x, tables))
    assert launches[qk.OP] == 0


def test_norms_of_two_kinds_are_calls_of_their_own(launches):
    torch.manual_seed(0)
    model = Attention(eps=1e-3)
    y, _ = run(model)
    bound(model)
    assert torch.equal(run(model)[0], y)
    assert launches == {"rope": 1}


def test_tables_that_rope_does_not_take_are_left_to_the_function(launches):
    model = Attention()
    bound(model)
    _, (cos, sin) = arguments()
    q = torch.randn(2, 5, 3, HEAD)
    ours = qk.norm_and_turn(
        model.q_norm, model.k_norm, turning.turned(apply_rotary_pos_emb), True, q, q, cos.double(), sin.double()
    )
    normed = model.q_norm(q).transpose(1, 2)
    for a, b in zip(apply_rotary_pos_emb(normed, normed, cos.double(), sin.double()), ours, strict=True):
        assert torch.equal(a, b)
    assert launches[qk.OP] == launches["rope"] == 0


@pytest.mark.parametrize("left", ["rope", qk.OP])
def test_not_asked_for_is_not_looked_for(left):
    assert qk.OP not in {i.op for i in bound(Attention(), **{left: False})}


def test_without_the_norms_the_rotation_is_applied_alone(launches):
    items = [i for find in (qk.find, rotary.find) for i in find(Attention(), EVERY)]
    assert [(i.op, isinstance(i, Binding)) for i in items] == [(qk.OP, False), ("rope", True)]
    assert items[0].reason == "q_norm is no rms_norm of the registry's; k_norm is no rms_norm of the registry's"


def test_copies_pickles_and_back(launches):
    model = Attention()
    plain, _ = run(model)
    items = bound(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        launches.clear()
        assert torch.equal(run(made)[0], plain)
        assert launches == {qk.OP: 1}
    for item in reversed([i for i in items if isinstance(i, Binding)]):
        assert unbind(item) == ""
    launches.clear()
    assert torch.equal(run(model)[0], plain)
    assert not launches


def test_one_graph_under_compile():
    model = Attention()
    bound(model)
    x, tables = arguments()
    y = model(x, tables)
    graphs = []

    def backend(graph, example):
        graphs.append(sum("qk_norm_rope" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x, tables), y)
    assert graphs == [1]


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
@pytest.mark.filterwarnings("ignore")
def test_models_are_the_same(launches, model_type):
    torch.set_num_threads(1)
    model = zoo.small_model(model_type)
    inputs = zoo.inputs(model)
    plain = model(**inputs)
    tokens = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)
    bound(model)
    launches.clear()
    patched = model(**inputs)
    assert launches[qk.OP] == 2
    torch.testing.assert_close(patched.logits, plain.logits, rtol=1e-5, atol=1e-5)
    again = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(again, tokens)
