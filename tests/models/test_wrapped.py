"""All operations in models that PEFT wraps, and in code that is not what it was: names, keywords, replaced forwards."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from torch import nn

from liger_registry.transformers import apply

pytestmark = pytest.mark.filterwarnings("ignore")

ADAPTERS = {
    "every layer": {"target_modules": "all-linear"},
    "copies of norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    "copies of norms and head": {"target_modules": ["gate_proj"], "modules_to_save": ["q_norm", "lm_head"]},
    "trained norms": {"target_modules": ["down_proj"], "layers_to_transform": [0], "bias": "none"},
}


def step(model, inputs):
    torch.manual_seed(3)
    loss = model.train()(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("first", ["apply", "peft"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_peft(name, first):
    peft = pytest.importorskip("peft")
    models = [zoo.small_model("qwen3") for _ in range(2)]
    inputs, found, handle = zoo.inputs(models[0]), [], None
    for n, model in enumerate(models):
        if n and first == "apply":
            handle = apply(model)
        torch.manual_seed(7)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[name]))
        if name == "trained norms":
            for parameter_name, parameter in wrapped.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or "norm" in parameter_name)
        keys = list(wrapped.state_dict())
        if n and first == "peft":
            handle = apply(wrapped)
        assert list(wrapped.state_dict()) == keys
        assert "LoraConfig" not in repr(wrapped)
        found.append(step(wrapped, inputs))
    same(*found)
    assert handle.report.applied("rms_norm")
    assert handle.report.applied("swiglu")
    handle.revert()
    for gradients in (model.parameters() for model in models):
        for parameter in gradients:
            parameter.grad = None
    same(found[0], step(wrapped, inputs))


class Renamed(nn.Module):
    """A norm as a later release may have it: another name for its input, and a keyword more."""

    def __init__(self, norm):
        super().__init__()
        self.gain, self.epsilon = nn.Parameter(norm.weight.detach().clone()), norm.variance_epsilon

    def forward(self, states, added=None):
        states = states if added is None else states + added
        wide = states.to(torch.float32)
        return self.gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(states.dtype)


def test_keywords_that_nobody_knew_pass_through():
    model = zoo.small_model("llama")
    plain = copy.deepcopy(model)
    apply(model)
    x, inputs = torch.randn(2, 3, 32), zoo.inputs(model)
    for name in ("input_layernorm", "mlp"):
        ours, theirs = (getattr(m.model.layers[0], name) for m in (model, plain))
        with pytest.raises(TypeError, match="later"):
            theirs(x, later=1)
        with pytest.raises(TypeError, match="later"):  # the class's own error, and its own result once it takes it
            ours(x, later=1)
    kind = type(model.model.layers[0].input_layernorm)
    taking = type(
        "Taking", (kind,), {"forward": lambda self, hidden_states, later=1.0: later * kind.forward(self, hidden_states)}
    )
    for m in (model, plain):
        m.model.layers[0].input_layernorm.__class__ = taking
    both = [m.model.layers[0].input_layernorm(x, later=3.0) for m in (model, plain)]
    assert torch.equal(*both)
    assert torch.equal(*[m(**inputs, some_keyword_of_a_later_release=1).loss.isfinite() for m in (model, plain)])


def test_names_of_attributes_and_classes_do_not_matter():
    model = zoo.small_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm = Renamed(layer.input_layernorm)
    plain = copy.deepcopy(model)
    report = apply(model).report
    rows = {row.module: row for row in report if row.module.endswith("input_layernorm")}
    assert {row.kind for row in rows.values()} == {"Renamed"}
    inputs = zoo.inputs(model)
    same(step(plain, inputs), step(model, inputs))
    x, added = torch.randn(2, 2, 3, 32)
    ours, theirs = (m.model.layers[0].input_layernorm for m in (model, plain))
    torch.testing.assert_close(ours(x, added=added), theirs(x + added))


def test_what_was_replaced_changes_a_line_of_the_report():
    model = zoo.small_model("llama")
    plain = copy.deepcopy(model)
    for m in (model, plain):
        m.model.layers[0].mlp.forward = nn.Identity().forward
    report = apply(model).report
    assert [row.module for row in report.skipped("swiglu")] == ["model.layers.0.mlp"]
    assert [row.module for row in report.applied("swiglu")] == ["model.layers.1.mlp"]
    inputs = zoo.inputs(model)
    same(step(plain, inputs), step(model, inputs))
