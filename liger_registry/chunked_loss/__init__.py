"""Preference, policy and distillation losses over an output head, without (tokens, vocab) of logits.

The classes and functional forms of ``liger_kernel.chunked_loss`` 0.8.5, call for call: users change the package's name
in their imports, also in those of its submodules. A loss of one's own is a function of log-probabilities, see
``preference``.

Names load on first access (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_registry.chunked_loss.cosine_similarity_loss import (
        LigerFusedLinearCosineSimilarityLoss as LigerFusedLinearCosineSimilarityLoss,
    )
    from liger_registry.chunked_loss.cpo_loss import LigerFusedLinearCPOLoss as LigerFusedLinearCPOLoss
    from liger_registry.chunked_loss.distillation import LinearDistillationLoss as LinearDistillationLoss
    from liger_registry.chunked_loss.dpo_loss import LigerFusedLinearDPOLoss as LigerFusedLinearDPOLoss
    from liger_registry.chunked_loss.functional import liger_fused_linear_cosine as liger_fused_linear_cosine
    from liger_registry.chunked_loss.functional import liger_fused_linear_cpo as liger_fused_linear_cpo
    from liger_registry.chunked_loss.functional import liger_fused_linear_dpo as liger_fused_linear_dpo
    from liger_registry.chunked_loss.functional import liger_fused_linear_grpo as liger_fused_linear_grpo
    from liger_registry.chunked_loss.functional import liger_fused_linear_jsd as liger_fused_linear_jsd
    from liger_registry.chunked_loss.functional import liger_fused_linear_kto as liger_fused_linear_kto
    from liger_registry.chunked_loss.functional import liger_fused_linear_orpo as liger_fused_linear_orpo
    from liger_registry.chunked_loss.functional import liger_fused_linear_simpo as liger_fused_linear_simpo
    from liger_registry.chunked_loss.grpo import Policy as Policy
    from liger_registry.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
    from liger_registry.chunked_loss.head import Head as Head
    from liger_registry.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss as LigerFusedLinearJSDLoss
    from liger_registry.chunked_loss.kto_loss import LigerFusedLinearKTOLoss as LigerFusedLinearKTOLoss
    from liger_registry.chunked_loss.orpo_loss import LigerFusedLinearORPOLoss as LigerFusedLinearORPOLoss
    from liger_registry.chunked_loss.pairs import Pairs as Pairs
    from liger_registry.chunked_loss.preference import LinearPreferenceLoss as LinearPreferenceLoss
    from liger_registry.chunked_loss.simpo_loss import LigerFusedLinearSimPOLoss as LigerFusedLinearSimPOLoss

_NAMES = {
    "cosine_similarity_loss": "LigerFusedLinearCosineSimilarityLoss",
    "cpo_loss": "LigerFusedLinearCPOLoss",
    "distillation": "LinearDistillationLoss",
    "dpo_loss": "LigerFusedLinearDPOLoss",
    "functional": "liger_fused_linear_cosine liger_fused_linear_cpo liger_fused_linear_dpo liger_fused_linear_grpo "
    "liger_fused_linear_jsd liger_fused_linear_kto liger_fused_linear_orpo liger_fused_linear_simpo",
    "grpo": "Policy",
    "grpo_loss": "LigerFusedLinearGRPOLoss",
    "head": "Head",
    "jsd_loss": "LigerFusedLinearJSDLoss",
    "kto_loss": "LigerFusedLinearKTOLoss",
    "orpo_loss": "LigerFusedLinearORPOLoss",
    "pairs": "Pairs",
    "preference": "LinearPreferenceLoss",
    "simpo_loss": "LigerFusedLinearSimPOLoss",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
