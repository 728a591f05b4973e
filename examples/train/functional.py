"""Functional use, as in models that Megatron or torchtitan build: code that calls operations where it needs them.

The layers hold parameters alone, tensors are (batch, sequence, ...), the residual is handed from norm to norm, and the
last step is the loss of a chunk of hidden states under the head. Nothing of transformers is imported.
"""

import torch
import torch.nn.functional as F
from common import DEVICE, Run, batches, start
from torch import Tensor, nn

from liger_registry import registry

VOCAB, WIDTH, INNER, HEADS, EPS = 258, 64, 128, 4, 1e-6


class Plain:
    """The same in PyTorch, to compare."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (WIDTH,), weight, eps)

    @classmethod
    def fused_add_rms_norm(cls, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return cls.rms_norm(x + residual, weight, eps), x + residual

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            one, two = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]

        return turn(q), turn(k)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        return F.cross_entropy(hidden @ weight.T, target, ignore_index=ignore_index)


class Kernels:
    """The handles of the registry, each got once."""

    rms_norm = registry.get("rms_norm")
    fused_add_rms_norm = registry.get("fused_add_rms_norm")
    rope = registry.get("rope")
    swiglu = registry.get("swiglu")
    fused_linear_cross_entropy = registry.get("fused_linear_cross_entropy")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None, ops: type, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output before it is added to the residual, and the residual."""
        if residual is None:
            residual, x = x, ops.rms_norm(x, self.before, eps=EPS)
        else:
            x, residual = ops.fused_add_rms_norm(x, residual, self.before, eps=EPS)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = ops.rope(q, k, cos, sin)
        x = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        x, residual = ops.fused_add_rms_norm(x, residual, self.after, eps=EPS)
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(ops.swiglu(gate, up)), residual


class Model(nn.Module):
    def __init__(self, ops: type) -> None:
        super().__init__()
        self.ops = ops
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1])[:, None] * 1e4 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        angles = torch.cat([angles, angles], -1)[None].to(ids.device)
        x, residual = self.embed(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, self.ops, angles.cos(), angles.sin())
        x, _ = self.ops.fused_add_rms_norm(x, residual, self.norm, eps=EPS)
        return self.ops.fused_linear_cross_entropy(x.flatten(0, 1), self.head.weight, target.flatten(), ignore_index=0)


def main(kernels: bool, directory: str) -> Run:
    torch.manual_seed(0)
    model, losses = Model(Kernels if kernels else Plain).to(DEVICE), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for ids in batches():
        ids = ids.to(DEVICE)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # What answers here, and why: there is no model to report on.
    x = torch.randn(4, 63, WIDTH, device=DEVICE, requires_grad=True)
    return Run(losses, [registry.get("rms_norm").explain(x, model.norm)] if kernels else [])


if __name__ == "__main__":
    start(main)
