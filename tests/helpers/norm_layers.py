"""Norms of the model families, as layers that tests look at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 48


class Weighted(nn.Module):
    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.4, 1.7, width))
        self.eps = eps

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class LlamaNorm(Weighted):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(input_dtype)


class LlamaOtherwise(Weighted):
    """The same in other words."""

    def scale(self, x):
        return 1 / torch.sqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + self.eps)

    def forward(self, h):
        wide = h.float()
        return (self.scale(wide) * wide).type_as(h) * self.weight


class GemmaNorm(Weighted):
    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class OlmoNorm(Weighted):
    def forward(self, x):
        return (self.weight * self._norm(x.to(torch.float32))).to(x.dtype)


class HeliumNorm(Weighted):
    def forward(self, x):
        return (self.weight.to(torch.float32) * self._norm(x.to(torch.float32))).to(x.dtype)


class Gemma3nNorm(Weighted):
    def __init__(self, width=WIDTH, eps=1e-6, with_scale=True):
        super().__init__(width, eps)
        self.with_scale = with_scale
        if not with_scale:
            del self.weight

    def _norm(self, x):
        return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)

    def forward(self, x):
        out = self._norm(x.float())
        if self.with_scale:
            out = out * self.weight.float()
        return out.type_as(x)


class T5Norm(Weighted):
    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class Checked(Weighted):
    def forward(self, x):
        if x.size(-1) != self.width:
            raise AssertionError("width")
        variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(variance + self.eps)).to(x.dtype) * self.weight

    width = WIDTH


class Bare(Weighted):
    """No casts: in bf16 it rounds after every step."""

    def forward(self, x):
        return self.weight * self._norm(x)


class OffsetInItsDtype(Weighted):
    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight).float()).type_as(x)


class CohereNorm(Weighted):
    def forward(self, x):
        wide = x.to(torch.float32)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        wide = (wide - mean) * torch.rsqrt(variance + self.eps)
        return (self.weight.to(torch.float32) * wide).to(x.dtype)


class OffsetLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class WideLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.to(dtype=torch.float32), self.normalized_shape, None, None, eps=1e-5).to(x.dtype)


class SuperLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)
