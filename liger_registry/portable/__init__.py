"""The PyTorch implementations: every operation on every device, float64 included, with nothing but torch.

They are registered through the entry point like everybody's, and compete with the Triton kernels wherever both can run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_registry.catalog import Staging

LIGER_REGISTRY_API = (1, 0)


def register(registry: Staging) -> None:
    """Register the PyTorch implementations; imports no torch."""
    from liger_registry.portable.spaces import (
        cross_entropy,
        fused_add_rms_norm,
        fused_linear_cross_entropy,
        fused_linear_jsd,
        geglu,
        group_norm,
        jsd,
        kl_div,
        layer_norm,
        linear_logp,
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
        torch_linear_cross_entropy,
        tvd,
    )

    for op in (
        cross_entropy,
        fused_add_rms_norm,
        fused_linear_cross_entropy,
        fused_linear_jsd,
        geglu,
        group_norm,
        jsd,
        kl_div,
        layer_norm,
        linear_logp,
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
        torch_linear_cross_entropy,
        tvd,
    ):
        for implementation in op.IMPLEMENTATIONS:
            registry.register(implementation)
