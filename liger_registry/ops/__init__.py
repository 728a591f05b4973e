"""The contracts of the operations, one file each; registered through the entry point like everybody's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_registry.catalog import Staging

LIGER_REGISTRY_API = (1, 0)


def register(registry: Staging) -> None:
    """Register the contracts of this distribution."""
    from liger_registry.ops import (
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
        tvd,
    ):
        registry.register(op.OP)
