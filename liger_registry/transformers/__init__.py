"""The faces of liger-kernel 0.8.5, call for call, over ``registry.get``: modules, losses and functional forms.

Users of ``liger_kernel.transformers`` change the package's name in their imports, also in those of its submodules.
Where liger-kernel writes into the caller's memory, these do not: ``in_place`` is accepted, and results are equal. Any
other option is honoured, or raises an error of ``liger_registry.errors``.

Names load on first access (PEP 562): importing this package imports neither Triton nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_registry.transformers.auto_model import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
    from liger_registry.transformers.callback import LigerRegistryCallback as LigerRegistryCallback
    from liger_registry.transformers.cross_entropy import LigerCrossEntropyLoss as LigerCrossEntropyLoss
    from liger_registry.transformers.engine.adapters import Adapter as Adapter
    from liger_registry.transformers.engine.apply import Applied as Applied
    from liger_registry.transformers.engine.apply import applied_to as applied_to
    from liger_registry.transformers.engine.apply import apply as apply
    from liger_registry.transformers.engine.binding import Binding as Binding
    from liger_registry.transformers.engine.report import Report as Report
    from liger_registry.transformers.engine.report import Row as Row
    from liger_registry.transformers.functional import CrossEntropyOutput as CrossEntropyOutput
    from liger_registry.transformers.functional import liger_cross_entropy as liger_cross_entropy
    from liger_registry.transformers.functional import liger_fused_add_rms_norm as liger_fused_add_rms_norm
    from liger_registry.transformers.functional import (
        liger_fused_linear_cross_entropy as liger_fused_linear_cross_entropy,
    )
    from liger_registry.transformers.functional import liger_fused_linear_jsd as liger_fused_linear_jsd
    from liger_registry.transformers.functional import liger_geglu as liger_geglu
    from liger_registry.transformers.functional import liger_group_norm as liger_group_norm
    from liger_registry.transformers.functional import liger_jsd as liger_jsd
    from liger_registry.transformers.functional import liger_kl_div as liger_kl_div
    from liger_registry.transformers.functional import liger_layer_norm as liger_layer_norm
    from liger_registry.transformers.functional import liger_qwen2vl_mrope as liger_qwen2vl_mrope
    from liger_registry.transformers.functional import liger_relu_squared as liger_relu_squared
    from liger_registry.transformers.functional import liger_rms_norm as liger_rms_norm
    from liger_registry.transformers.functional import liger_rope as liger_rope
    from liger_registry.transformers.functional import liger_softmax as liger_softmax
    from liger_registry.transformers.functional import liger_swiglu as liger_swiglu
    from liger_registry.transformers.functional import liger_tvd as liger_tvd
    from liger_registry.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
    from liger_registry.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss,
    )
    from liger_registry.transformers.fused_linear_jsd import LigerFusedLinearJSD as LigerFusedLinearJSD
    from liger_registry.transformers.geglu import LigerGEGLUMLP as LigerGEGLUMLP
    from liger_registry.transformers.group_norm import LigerGroupNorm as LigerGroupNorm
    from liger_registry.transformers.hub import kernel_mapping as kernel_mapping
    from liger_registry.transformers.hub import register_kernels as register_kernels
    from liger_registry.transformers.jsd import LigerJSD as LigerJSD
    from liger_registry.transformers.kl_div import LigerKLDIVLoss as LigerKLDIVLoss
    from liger_registry.transformers.layer_norm import LigerLayerNorm as LigerLayerNorm
    from liger_registry.transformers.llama4_rope import (
        liger_llama4_text_rotary_pos_emb as liger_llama4_text_rotary_pos_emb,
    )
    from liger_registry.transformers.llama4_rope import (
        liger_llama4_vision_rotary_pos_emb as liger_llama4_vision_rotary_pos_emb,
    )
    from liger_registry.transformers.mlp import LigerFalconH1MLP as LigerFalconH1MLP
    from liger_registry.transformers.mlp import LigerMLP as LigerMLP
    from liger_registry.transformers.relu_squared import LigerReLUSquared as LigerReLUSquared
    from liger_registry.transformers.rms_norm import LigerRMSNorm as LigerRMSNorm
    from liger_registry.transformers.rms_norm import LigerRMSNormForMuseGlimmer as LigerRMSNormForMuseGlimmer
    from liger_registry.transformers.rms_norm import (
        LigerRMSNormForMuseGlimmerTextCentered as LigerRMSNormForMuseGlimmerTextCentered,
    )
    from liger_registry.transformers.rope import liger_rotary_pos_emb as liger_rotary_pos_emb
    from liger_registry.transformers.softmax import LigerSoftmax as LigerSoftmax
    from liger_registry.transformers.swiglu import LigerBlockSparseTop2MLP as LigerBlockSparseTop2MLP
    from liger_registry.transformers.swiglu import LigerFalconH1SwiGLUMLP as LigerFalconH1SwiGLUMLP
    from liger_registry.transformers.swiglu import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
    from liger_registry.transformers.swiglu import LigerQwen3MoeSwiGLUMLP as LigerQwen3MoeSwiGLUMLP
    from liger_registry.transformers.swiglu import LigerSwiGLUMLP as LigerSwiGLUMLP
    from liger_registry.transformers.swiglu import LigerSwiGLUMLPForMuseGlimmer as LigerSwiGLUMLPForMuseGlimmer
    from liger_registry.transformers.tiled_mlp import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
    from liger_registry.transformers.tiled_mlp import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
    from liger_registry.transformers.trl import AppliedToTRL as AppliedToTRL
    from liger_registry.transformers.trl import apply_to_trl as apply_to_trl
    from liger_registry.transformers.tvd import LigerTVDLoss as LigerTVDLoss
    from liger_registry.transformers.vocabulary_parallel import (
        vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy,
    )
    from liger_registry.transformers.vocabulary_parallel import vocabulary_parallel_logp as vocabulary_parallel_logp

_NAMES = {
    "auto_model": "AutoLigerKernelForCausalLM",
    "callback": "LigerRegistryCallback",
    "cross_entropy": "LigerCrossEntropyLoss",
    "engine.adapters": "Adapter",
    "engine.apply": "Applied apply applied_to",
    "engine.binding": "Binding",
    "engine.report": "Report Row",
    "functional": "CrossEntropyOutput liger_cross_entropy liger_fused_add_rms_norm liger_fused_linear_cross_entropy "
    "liger_fused_linear_jsd liger_geglu liger_group_norm liger_jsd liger_kl_div liger_layer_norm liger_qwen2vl_mrope "
    "liger_relu_squared liger_rms_norm liger_rope liger_softmax liger_swiglu liger_tvd",
    "fused_add_rms_norm": "LigerFusedAddRMSNorm",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
    "fused_linear_jsd": "LigerFusedLinearJSD",
    "geglu": "LigerGEGLUMLP",
    "group_norm": "LigerGroupNorm",
    "hub": "kernel_mapping register_kernels",
    "jsd": "LigerJSD",
    "kl_div": "LigerKLDIVLoss",
    "layer_norm": "LigerLayerNorm",
    "llama4_rope": "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb",
    "mlp": "LigerFalconH1MLP LigerMLP",
    "relu_squared": "LigerReLUSquared",
    "rms_norm": "LigerRMSNorm LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered",
    "rope": "liger_rotary_pos_emb",
    "softmax": "LigerSoftmax",
    "swiglu": "LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP "
    "LigerSwiGLUMLPForMuseGlimmer",
    "tiled_mlp": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
    "trl": "AppliedToTRL apply_to_trl",
    "tvd": "LigerTVDLoss",
    "vocabulary_parallel": "vocabulary_parallel_cross_entropy vocabulary_parallel_logp",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)
_MONKEY = ("apply_liger_kernel_to_", "_apply_liger_kernel", "MODEL_TYPE_TO_APPLY_LIGER_FN")


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith(_MONKEY):
        return getattr(importlib.import_module(f"{__name__}.monkey_patch"), name)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
