"""Triton implementations for AMD GPUs: what they can do, and their config spaces. None was run on one yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_registry.catalog import Staging

LIGER_REGISTRY_API = (1, 0)


def register(registry: Staging) -> None:
    """Register the implementations; imports neither Triton nor torch."""
    from liger_registry_rocm import (
        cross_entropy,
        fused_add_rms_norm,
        fused_linear_cross_entropy,
        geglu,
        group_norm,
        jsd,
        kl_div,
        layer_norm,
        linear_sequence_loss,
        logit_cosine,
        logit_divergence,
        logit_statistics,
        qk_norm_rope,
        relu_squared,
        rms_norm,
        rope,
        softmax,
        swiglu,
        tvd,
    )

    for op in (
        cross_entropy,
        fused_add_rms_norm,
        fused_linear_cross_entropy,
        geglu,
        group_norm,
        jsd,
        kl_div,
        layer_norm,
        linear_sequence_loss,
        logit_cosine,
        logit_divergence,
        logit_statistics,
        qk_norm_rope,
        relu_squared,
        rms_norm,
        rope,
        softmax,
        swiglu,
        tvd,
    ):
        for implementation in op.IMPLEMENTATIONS:
            registry.register(implementation)
