"""Rotary position embedding under the name and with the arguments of the models' function."""

from __future__ import annotations

import torch

from liger_registry.transformers.functional import liger_rope

Tensor = torch.Tensor


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``liger_rope``, in the place of a model's ``apply_rotary_pos_emb``."""
    return liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` of whole heads by tables of one column a pair, as of GPT-OSS."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` in fp32 of (tokens, heads, head_dim) by tables (tokens, head_dim), as of Qwen3-VL."""
    q, k = liger_rope(q.unsqueeze(0), k.unsqueeze(0), cos.float(), sin.float(), unsqueeze_dim=2)
    return q.squeeze(0), k.squeeze(0)
