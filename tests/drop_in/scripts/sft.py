"""Fine-tuning of a Llama whose layers and loss liger-kernel takes over; with --plain without it."""

import sys

import torch
from liger_kernel.transformers import AutoLigerKernelForCausalLM, apply_liger_kernel_to_llama
from transformers import AutoModelForCausalLM, LlamaConfig

PLAIN = "--plain" in sys.argv
config = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        ids = torch.randint(0, config.vocab_size, (2, 17), generator=generator)
        labels = ids.masked_fill(torch.arange(17) < 5, -100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


if not PLAIN:
    apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True)
torch.manual_seed(0)
train(AutoModelForCausalLM.from_config(config))
torch.manual_seed(0)
train((AutoModelForCausalLM if PLAIN else AutoLigerKernelForCausalLM).from_config(config))
