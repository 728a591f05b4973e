"""Gated MLPs in the shapes that models have, and activations, as layers that tests look at."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, WIDE = 8, 12


class SquaredReLU(nn.Module):
    def forward(self, input):
        relu_applied = nn.functional.relu(input)
        squared = torch.square(relu_applied)
        return squared


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class WrappedGELU(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, input):
        return self.act(input)


class OwnSiLU(nn.Module):
    def forward(self, x):
        return F.silu(x)


class Split(nn.Module):
    def __init__(self, act=None, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, WIDE, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, WIDE, bias=bias)
        self.down_proj = nn.Linear(WIDE, HIDDEN, bias=bias)
        self.act_fn = OwnSiLU() if act is None else act

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class Swapped(Split):
    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class Named(Split):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Functional(Split):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Around(Split):
    """With a norm, a dropout and a clamp, and an argument that nobody gives."""

    def __init__(self, act=None):
        super().__init__(act)
        self.norm, self.drop = nn.LayerNorm(WIDE), nn.Dropout(0.3)

    def forward(self, x, layer=None):
        if layer is not None:
            raise ValueError
        gate = self.gate_proj(x).clamp(max=1.0)
        up = self.up_proj(x).clamp(min=-1.0, max=1.0)
        out = self.down_proj(self.norm(self.act_fn(gate) * up))
        return F.dropout(self.drop(out), p=0.2, training=self.training)


class Widened(Split):
    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))


class Multiplied(Split):
    def __init__(self, act=None):
        super().__init__(act)
        self.gate_multiplier, self.down_multiplier = 0.7, 1.3

    def forward(self, x):
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class Packed(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, HIDDEN, bias=False)
        self.activation_fn = OwnSiLU() if act is None else act

    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class PackedOtherwise(Packed):
    def forward(self, x):
        a, b = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation_fn(a) * b)


class UpFirst(Packed):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation_fn(gate) * up)


class UsedTwice(Packed):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation_fn(gate) * up + up)


class Indexed(Packed):
    def forward(self, x):
        batch, length, _ = x.shape
        h = self.gate_up_proj(x).view(batch, length, 2, -1)
        h = self.activation_fn(h[..., 0, :]) * h[..., 1, :]
        return self.down_proj(h)


class Looped(Packed):
    def forward(self, x):
        out = torch.zeros_like(x)
        for n in range(2):
            gate, up = self.gate_up_proj(x + n).chunk(2, dim=-1)
            out = out + self.down_proj(self.activation_fn(gate) * up)
        return out
