"""Rotary position embedding of Llama 4, whose angles are complex numbers."""

from __future__ import annotations

import torch

from liger_registry.errors import InvalidInputError
from liger_registry.transformers._rotary import complex_turned

Tensor = torch.Tensor


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours turned as complex numbers, in fp32, each result in its input's dtype.

    Args:
        xq: (batch, tokens, heads, head_dim).
        xk: the same with another number of heads.
        freqs_cis: (tokens, head_dim / 2) or (batch, tokens, head_dim / 2), complex.

    Raises:
        UnsupportedDtypeError: real angles.
    """
    return complex_turned("liger_llama4_text_rotary_pos_emb", xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours turned as complex numbers, in fp32, each result in its input's dtype.

    Args:
        query: (batch, tokens, heads, head_dim).
        key: the same.
        freqs_ci: tokens times head_dim / 2 numbers in any shape with the tokens before the pairs. They are complex, or
            real where a model was cast to a real dtype, which drops their sines; the model then computes with none.

    Raises:
        InvalidInputError: another number of angles.
    """
    tokens, pairs = query.shape[1], query.shape[-1] // 2
    if freqs_ci.numel() != tokens * pairs:
        raise InvalidInputError(
            f"freqs_ci of liger_llama4_vision_rotary_pos_emb has shape {tuple(freqs_ci.shape)}",
            why=f"there is one angle for each of {tokens} tokens and {pairs} pairs",
            fix="pass the angles of these tokens",
        )
    angles = freqs_ci.reshape(tokens, pairs)
    if not angles.is_complex():
        angles = torch.complex(angles.float(), torch.zeros_like(angles, dtype=torch.float32))
    return complex_turned("liger_llama4_vision_rotary_pos_emb", query, key, angles)
