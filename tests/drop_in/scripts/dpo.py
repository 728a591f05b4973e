"""Preference training with the fused DPO loss; with --plain with its formula."""

import sys

import torch
import torch.nn.functional as F
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import AutoModelForCausalLM, Qwen3Config

PLAIN = "--plain" in sys.argv
BETA = 0.2
config = Qwen3Config(
    vocab_size=80,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
torch.manual_seed(0)
policy, reference = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
reference.requires_grad_(False)
if not PLAIN:
    _apply_liger_kernel_to_instance(model=policy)
    _apply_liger_kernel_to_instance(model=reference)


def score(hidden, head, target):
    logps = (hidden @ head.weight.T).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return (logps * (target != -100)).sum(-1)


def plain(weight, hidden, target, ref_hidden):
    policy_chosen, policy_rejected = score(hidden, policy.lm_head, target).chunk(2)
    chosen, rejected = score(ref_hidden, reference.lm_head, target).chunk(2)
    return -F.logsigmoid(BETA * (policy_chosen - chosen - policy_rejected + rejected)).mean()


dpo = LigerFusedLinearDPOLoss(beta=BETA, compiled=False, use_ref_model=True)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    ids = torch.randint(0, config.vocab_size, (4, 12), generator=generator)  # two chosen, then two rejected
    target = ids[:, 1:].masked_fill(torch.arange(11) < 3, -100)
    hidden = policy.model(input_ids=ids).last_hidden_state[:, :-1]
    with torch.no_grad():
        ref_hidden = reference.model(input_ids=ids).last_hidden_state[:, :-1]
    if PLAIN:
        loss = plain(policy.lm_head.weight, hidden, target, ref_hidden)
    else:
        loss, metrics = dpo(
            policy.lm_head.weight, hidden, target, ref_input=ref_hidden, ref_weight=reference.lm_head.weight
        )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
