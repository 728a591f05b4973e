"""A loop in plain PyTorch over a model of one's own, whose layers ``apply`` recognises by what they compute."""

import torch
import torch.nn.functional as F
from common import DEVICE, Run, batches, start
from torch import nn

from liger_registry.transformers import apply

VOCAB, WIDTH, HEADS = 258, 64, 4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 128, bias=False)
        self.down = nn.Linear(128, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.mlp = Norm(), Norm(), MLP()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), Norm()
        self.blocks = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.blocks(self.embed(ids))))


def main(kernels: bool, directory: str) -> Run:
    torch.manual_seed(0)
    model, losses = Model().to(DEVICE), []
    reports = [apply(model).report] if kernels else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for ids in batches():
        ids = ids.to(DEVICE)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, reports)


if __name__ == "__main__":
    start(main)
