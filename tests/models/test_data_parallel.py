"""``nn.DataParallel``: replicas of a patched model call what serves them, with their own parameters."""

from __future__ import annotations

import sys

import pytest
import torch
import zoo
from torch import nn
from torch.nn.parallel.replicate import replicate

from liger_registry.errors import AdapterError
from liger_registry.transformers import Binding, apply
from liger_registry.transformers.engine.binding import bind, unbind

pytestmark = pytest.mark.filterwarnings("ignore")


class Moved(torch.autograd.Function):
    """What stands for a copy on another device: other numbers, so that to take the model's own is noticed."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor * 0.75

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.75


@pytest.fixture
def on_cpu(monkeypatch):
    """Replicas whose parameters stay on the CPU."""

    def moved(tensors, devices, detach=False):
        return [[t.detach().clone() if detach else Moved.apply(t) for t in tensors] for _ in devices]  # detach: buffers

    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", moved)


def step(model):
    """The summed loss of two replicas with half of the batch each, and the model's gradients."""
    inputs = zoo.inputs(model, batch=4)
    replicas = replicate(model, [0, 1])
    losses = []
    for n, replica in enumerate(replicas):
        half = {name: v[2 * n : 2 * n + 2] if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
        losses.append(replica(**half).loss)
    total = sum(losses)
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(name, marks=pytest.mark.ci) for name in ("qwen3", "mixtral", "gpt2", "nemotron"))],
)
def test_replicas_compute_with_their_own_parameters(model_type, on_cpu):
    plain, model = (zoo.small_model(model_type).eval() for _ in range(2))
    expected, gradients = step(plain)
    applied = apply(model)
    loss, ours = step(model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    applied.revert()
    assert not any("_replicate_for_data_parallel" in vars(part) for part in model.modules())


def test_what_does_not_show_its_module_is_refused(on_cpu):
    model = nn.Sequential(nn.Linear(3, 3))
    binding = Binding("rms_norm", "0", model[0], "forward", lambda x: model[0].weight @ x)
    bind(binding)
    with pytest.raises(AdapterError, match="DataParallel"):
        replicate(model, [0, 1])
    unbind(binding)
    assert len(replicate(model, [0, 1])) == 2
