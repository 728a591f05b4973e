"""Layers compiled one by one: those that are alike share what was compiled, as they do in a plain model."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn
from torch._dynamo.testing import CompileCounter

from liger_registry.transformers import apply

LAYERS = 6
SIZES = {
    **{name: {"num_hidden_layers": LAYERS} for name in ("llama", "mixtral", "phi3", "nemotron", "olmo2")},
    "gpt2": {"n_layer": LAYERS},
    "qwen3": {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS},
    "gemma2": {"num_hidden_layers": LAYERS, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
}
pytestmark = pytest.mark.filterwarnings("ignore")


def compiled(model):
    """How many graphs the layers of a model are compiled to in a training step, how many operations, and the loss."""
    torch._dynamo.reset()
    counter = CompileCounter()
    layers = max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)
    assert len(layers) == LAYERS
    for layer in layers:
        layer.compile(backend=counter)
    torch.manual_seed(3)
    loss = model.train()(**zoo.inputs(model)).loss
    loss.backward()
    return counter.frame_count, counter.op_count, loss.detach()


@pytest.mark.ci
@pytest.mark.parametrize("model_type", SIZES)
def test_layers_share_what_was_compiled(model_type):
    plain, model = (zoo.small_model(model_type, **SIZES[model_type]) for _ in range(2))
    graphs, operations, expected = compiled(plain)
    applied = apply(model)
    assert len(applied.report.applied()) > LAYERS
    ours, others, loss = compiled(model)
    assert ours == graphs
    assert graphs < LAYERS or model_type == "mixtral"  # whose experts were a loop before transformers 5
    assert others != operations
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_a_replacement_of_any_class_is_bound_as_a_method():
    """What Dynamo guards on is then the function, the same one for all layers."""
    model = zoo.small_model("llama")
    apply(model)
    bound = [part.__dict__["forward"] for part in model.modules() if "forward" in part.__dict__]
    assert len(bound) > 4
    assert len({method.__func__ for method in bound}) < len(bound)
