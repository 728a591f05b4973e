"""The autograd functions of ``liger_kernel.chunked_loss`` by what is called of them: ``apply``, with its arguments."""

from __future__ import annotations

from liger_registry.chunked_loss import functional
from liger_registry.drop_in.functions import _face

LigerFusedLinearCPOFunction = _face("LigerFusedLinearCPOFunction", functional.liger_fused_linear_cpo)
LigerFusedLinearCosineSimilarityFunction = _face(
    "LigerFusedLinearCosineSimilarityFunction", functional.liger_fused_linear_cosine
)
LigerFusedLinearDPOFunction = _face("LigerFusedLinearDPOFunction", functional.liger_fused_linear_dpo)
LigerFusedLinearGRPOFunction = _face("LigerFusedLinearGRPOFunction", functional.liger_fused_linear_grpo)
LigerFusedLinearJSDFunction = _face("LigerFusedLinearJSDFunction", functional.liger_fused_linear_jsd)
LigerFusedLinearKTOFunction = _face("LigerFusedLinearKTOFunction", functional.liger_fused_linear_kto)
LigerFusedLinearORPOFunction = _face("LigerFusedLinearORPOFunction", functional.liger_fused_linear_orpo)
LigerFusedLinearSimPOFunction = _face("LigerFusedLinearSimPOFunction", functional.liger_fused_linear_simpo)
