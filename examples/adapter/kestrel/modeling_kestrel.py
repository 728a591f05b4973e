"""A language model as it comes with a checkpoint: small, with a norm and a loss of its own writing."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_kestrel import KestrelConfig


class KestrelNorm(nn.Module):
    """A root-mean-square norm whose sum of squares is an einsum."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        energy = torch.einsum("...i,...i->...", wide, wide) / x.shape[-1]
        return self.weight * (wide * torch.rsqrt(energy + self.eps)[..., None]).to(x.dtype)


class KestrelAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class KestrelMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class KestrelLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.before = KestrelNorm(config.hidden_size, config.norm_eps)
        self.attention = KestrelAttention(config)
        self.between = KestrelNorm(config.hidden_size, config.norm_eps)
        self.mlp = KestrelMLP(config)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class KestrelForCausalLM(PreTrainedModel):
    config_class = KestrelConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(KestrelLayer(config) for _ in range(config.num_hidden_layers))
        self.last = KestrelNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def token_loss(self, logits, labels):
        """The mean over all tokens but those that have no label."""
        losses = -logits[:, :-1].float().log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        counted = labels[:, 1:] != -100
        return (losses * counted).sum() / counted.sum()

    def forward(self, input_ids, labels=None, **kwargs):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x))
        loss = None if labels is None else self.token_loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)
