"""An adapter for Kestrel models: it binds what liger-registry's own adapters do not see through.

Those find Kestrel's gated MLP and its output head. The norm's einsum is nothing they know, and the loss, written out in
``token_loss``, would have the logits computed that the head leaves out.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from liger_registry import registry
from liger_registry.transformers import Adapter, Binding, Row

LIGER_REGISTRY_API = (1, 0)


class NormForward:
    """Kestrel's norm through ``rms_norm``.

    An object with the module as an attribute, and not a closure: models are copied and pickled, and their parameters
    are exchanged by PEFT and FSDP. All that the operation does not take goes to the class's own code.
    """

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        norm = self.module
        if torch.is_autocast_enabled(x.device.type) or norm.weight.dtype != x.dtype:
            return type(norm).forward(norm, x)
        return registry.get("rms_norm")(x, norm.weight, eps=norm.eps, casting="llama")


class TokenLoss:
    """Kestrel's loss as PyTorch's cross-entropy, which needs no logits of a head that was bound by ``apply``."""

    def __init__(self, module):
        self.module = module

    def __call__(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def find(model, enabled):
    """What to bind: an adapter finds, and ``apply`` binds, reports and reverts."""
    for path, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.endswith("modeling_kestrel"):
            continue
        if kind.__name__ == "KestrelNorm" and enabled["rms_norm"]:
            if same(kind, module.eps):
                yield Binding("rms_norm", path, module, "forward", NormForward(module), "the norm of Kestrel")
            else:
                yield Row("rms_norm", path, False, "the norm of this Kestrel computes something else", kind.__name__)
        elif kind.__name__ == "KestrelForCausalLM" and enabled["fused_linear_cross_entropy"]:
            yield Binding(
                "fused_linear_cross_entropy", path, module, "token_loss", TokenLoss(module), "the loss of Kestrel"
            )


def same(kind, eps):
    """Whether the norm still computes what it did when this was written: its code comes with the checkpoint."""
    norm = kind(8, eps)
    x = torch.linspace(-2, 3, 24).view(3, 8)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 8))
        expected = registry.op("rms_norm").reference(x, norm.weight, eps=eps, casting="llama")
        return torch.allclose(norm(x), expected, rtol=1e-5, atol=1e-6)


def register(adapters):
    """Called once, when ``apply`` is first used."""
    adapters.register(Adapter("kestrel", ("rms_norm", "fused_linear_cross_entropy"), find))
