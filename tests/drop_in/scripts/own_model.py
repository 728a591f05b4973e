"""A model of one's own from liger-kernel's modules and functions; with --plain from torch's."""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.transformers.functional import liger_layer_norm
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from torch import nn

PLAIN = "--plain" in sys.argv
HEADS, WIDTH, VOCAB = 4, 32, 72
config = SimpleNamespace(hidden_size=WIDTH, intermediate_size=56, hidden_act="silu")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 56, bias=False)
        self.up_proj = nn.Linear(WIDTH, 56, bias=False)
        self.down_proj = nn.Linear(56, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def turn(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        norm = (lambda: nn.RMSNorm(WIDTH, eps=1e-6)) if PLAIN else (lambda: LigerRMSNorm(hidden_size=WIDTH, eps=1e-6))
        self.before, self.after = norm(), norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = MLP() if PLAIN else LigerSwiGLUMLP(config)

    def forward(self, x, cos, sin):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        if PLAIN:
            q, k = turn(q, cos[:, None], sin[:, None]), turn(k, cos[:, None], sin[:, None])
        else:
            q, k = liger_rotary_pos_emb(q, k, cos, sin)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, WIDTH), Block()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] * 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        angles = torch.cat([angles, angles], -1)[None]
        x = self.block(self.embed(ids), angles.cos(), angles.sin())
        if PLAIN:
            return F.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-5)
        return liger_layer_norm(x, self.weight, self.bias, 1e-5)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
fused, unfused = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1), LigerCrossEntropyLoss(label_smoothing=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(4):
    ids = torch.randint(0, VOCAB, (2, 13), generator=generator)
    hidden, target = model(ids)[:, :-1].reshape(-1, WIDTH), ids[:, 1:].reshape(-1)
    if PLAIN:
        loss = F.cross_entropy(model.head(hidden), target, label_smoothing=0.1)
    elif step % 2:
        loss = fused(model.head.weight, hidden, target)
    else:
        loss = unfused(model.head(hidden), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
