"""Rotary position embedding of Qwen2-VL under the name of the model's function."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from liger_registry.transformers.functional import liger_qwen2vl_mrope

Tensor = torch.Tensor


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``liger_qwen2vl_mrope``, in the place of the model's ``apply_multimodal_rotary_pos_emb``."""
    return liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)
