"""What the engine remembers of classes goes with them, as where the cell of a notebook is run again."""

from __future__ import annotations

import gc
import importlib.util
import textwrap
import weakref

import pytest
import torch

from liger_registry.transformers import apply

CODE = textwrap.dedent("""
    import torch
    from torch import nn


    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

        def scale(self, x):
            return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

        def forward(self, x):
            wide = x.float()
            return self.weight * (wide * self.scale(wide)).to(x.dtype)


    class Squared(nn.Module):
        def forward(self, x):
            return torch.relu(x).square()


    class Gated(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.act = nn.SiLU()

        def forward(self, x):
            return self.down(self.act(self.gate(x)) * self.up(x))


    def rotate_half(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


    def apply_rotary_pos_emb(q, k, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.q, self.k = (nn.Linear(width, width, bias=False) for _ in range(2))

        def forward(self, x, cos, sin):
            shape = (*x.shape[:-1], 2, -1)
            q, k = self.q(x).view(shape).transpose(1, 2), self.k(x).view(shape).transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            return (q * k).transpose(1, 2).reshape(x.shape)


    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.post_norm = Norm(width), Norm(width)
            self.attention, self.mlp, self.act = Attention(width), Gated(width), Squared()

        def forward(self, x, cos, sin):
            residual = x
            x = self.attention(self.norm(x), cos, sin)
            x = residual + x
            residual = x
            x = self.post_norm(x)
            return residual + self.act(self.mlp(x))
""")
KINDS = ("Norm", "Squared", "Gated", "Attention", "Layer")
OPS = {"rms_norm", "relu_squared", "swiglu", "rope", "fused_add_rms_norm"}


def used(module):
    """A model of a module's classes, applied to, called and given back."""
    model = module.Layer(16)
    applied = apply(model)
    assert {row.op for row in applied.report.applied()} == OPS, str(applied.report)
    cos, sin = torch.randn(2, 1, 5, 8)
    model(torch.randn(1, 5, 16), cos, sin).sum().backward()
    applied.revert()


def imported(path):
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("code_of_a_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("reverted", [True, False])
def test_classes_that_are_gone_are_forgotten(tmp_path, reverted):
    module = imported(tmp_path / "modeling.py")
    used(module)
    if not reverted:
        apply(module.Layer(16))
    kinds = {name: weakref.ref(getattr(module, name)) for name in KINDS}
    # As a cell that is run again has it: the old classes and functions have no names any more, their globals stay.
    kept = dict(vars(module))
    for name in [name for name, value in kept.items() if getattr(value, "__module__", "") == module.__name__]:
        delattr(module, name)
    del kept
    gc.collect()
    assert [name for name, kind in kinds.items() if kind() is not None] == []
