"""``experts``: the gate between the two products of packed experts, in their own loop and in ``_apply_gate``."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.experts import find
from liger_registry.transformers.engine.gating import GatedForward

EXPERTS, HIDDEN, WIDE, TOKENS = 4, 8, 12, 10
EVERY = {"swiglu": True, "geglu": True}


def grouped(self, hidden, index, weights):
    """All experts for all tokens, and the gate by the method, as grouped implementations call it."""
    out = torch.einsum("th,eoh->teo", hidden, self.gate_up_proj)
    down = torch.einsum("teo,eho->teh", self._apply_gate(out), self.down_proj)
    return (down.gather(1, index[..., None].expand(-1, -1, down.shape[-1])) * weights[..., None]).sum(1)


def default_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def dispatched(cls):
    """What transformers' decorator does: the forward asks which implementation is to run."""
    original = cls.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return (grouped if self.implementation == "grouped" else original)(self, *args, **kwargs)

    if not hasattr(cls, "_apply_gate"):
        cls._apply_gate = default_gate
    cls.forward = forward
    return cls


class Base(nn.Module):
    def __init__(self, implementation="eager"):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDE, HIDDEN, generator=generator))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE, generator=generator))
        self.act_fn, self.implementation, self.limit = nn.SiLU(), implementation, 1.5


@dispatched
class Experts(Base):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        with torch.no_grad():
            mask = F.one_hot(top_k_index, num_classes=EXPERTS).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            position, token = torch.where(mask[expert])
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            current = self.act_fn(gate) * up
            current = F.linear(current, self.down_proj[expert]) * top_k_weights[token, position, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final


@dispatched
class Clamped(Base):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return grouped(self, hidden_states, top_k_index, top_k_weights)


@dispatched
class OtherGate(Base):
    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return grouped(self, hidden_states, top_k_index, top_k_weights)


class Batched(nn.Module):
    """All experts in one batched product, without a gate of its own to call."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDE))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN))
        self.act_fn, self.hidden_size = nn.GELU("tanh"), HIDDEN

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        gate_up = torch.bmm(hidden_states, self.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        next_states = torch.bmm(up * self.act_fn(gate), self.down_proj)
        return next_states.view(-1, self.hidden_size)


def given():
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, generator=generator)
    return torch.randn(TOKENS, HIDDEN, generator=generator), index, weights


def found(module, enabled=EVERY):
    return list(find(nn.ModuleDict({"experts": module}), enabled))


def counted(module):
    calls = []
    for binding in found(module):
        assert isinstance(binding, Binding), binding
        product = copy.copy(binding.replacement.product)

        def counting(op, gate, up, operate=product.operate, method=binding.attribute, **options):
            calls.append((method, op, up is None))
            return operate(op, gate, up, **options)

        product.operate = counting
        binding.replacement = GatedForward(module, binding.attribute, product)
        bind(binding)
    return calls


@pytest.mark.parametrize(("implementation", "method"), [("eager", "forward"), ("grouped", "_apply_gate")])
def test_both_ways_through_the_experts_are_served(implementation, method):
    module = Experts(implementation)
    plain = copy.deepcopy(module)
    calls = counted(module)
    results = []
    for one in (module, plain):
        y = one(*given())
        results.append((y, *torch.autograd.grad(y.square().sum(), list(one.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert set(calls) == {(method, "swiglu", True)}


def test_a_gate_with_clamps_keeps_them():
    module = Clamped("grouped")
    plain = copy.deepcopy(module)
    calls = counted(module)
    torch.testing.assert_close(module(*given()), plain(*given()))
    assert set(calls) == {("_apply_gate", "swiglu", False)}


def test_batched_experts_without_a_gate_method():
    module = Batched()
    plain = copy.deepcopy(module)
    calls = counted(module)
    x = torch.randn(3 * EXPERTS, HIDDEN)
    torch.testing.assert_close(module(x), plain(x))
    assert calls == [("forward", "geglu", True)]


def test_another_gate_is_left_alone_and_says_so():
    (row,) = found(OtherGate())
    assert (row.applied, row.reason) == (False, "its gate is no product with SiLU or GELU")
    assert found(OtherGate(), {"swiglu": False}) == []


def test_reverting_leaves_nothing():
    module = Experts()
    bindings = found(module)
    assert [binding.attribute for binding in bindings] == ["forward", "_apply_gate"]
    for binding in bindings:
        bind(binding)
    for binding in bindings:
        assert unbind(binding) == ""
    assert not {"forward", "_apply_gate"} & set(module.__dict__)


def test_large_experts_on_the_meta_device_are_found():
    with torch.device("meta"):
        module = Experts()
        module.gate_up_proj = nn.Parameter(torch.empty(128, 1536, 2048))
        module.down_proj = nn.Parameter(torch.empty(128, 2048, 768))
    assert all(isinstance(item, Binding) for item in found(module))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_transformers(implementation):
    pytest.importorskip("transformers.integrations.moe")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": 16, "moe_intermediate_size": 16, "num_experts": EXPERTS}
    config = Qwen3MoeConfig(num_hidden_layers=1, num_attention_heads=2, num_experts_per_tok=2, **sizes)
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    plain = copy.deepcopy(module)
    calls = counted(module)
    _, index, weights = given()
    x = torch.randn(TOKENS, 16)
    torch.testing.assert_close(module(x, index, weights), plain(x, index, weights))
    assert set(calls) == {("forward" if implementation == "eager" else "_apply_gate", "swiglu", True)}
