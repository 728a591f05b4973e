"""Where each name of liger-kernel 0.8.5 is in this distribution, or why it is not.

A module of ours under the same path answers with its public names; what else there is stands in ``_MORE``. Why a name
is not offered is said in ``absent``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

_CHUNKED = "cosine_similarity cpo dpo grpo jsd kto orpo simpo"
_BASES = "distillation ppo preference unpaired_preference"
_LAYERS = (
    "auto_model cross_entropy dyt experimental experimental.embedding fsdp functional fused_add_rms_norm fused_ce_tvd "
    "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_neighborhood_attention geglu group_norm "
    "grpo_loss jsd kl_div layer_norm llama4_rope mhc mlp model modulated_rms_norm moe monkey_patch "
    "multi_token_attention poly_norm qwen2vl_mrope relu_squared rms_norm rope softmax sparsemax swiglu tiled_mlp "
    "trainer trainer.orpo_trainer trainer_integration tvd vocab_parallel_cross_entropy"
)
_MODELS = (
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma4 glm4 glm4v glm4v_moe gpt_oss "
    "hunyuan_v1 internvl llama llama4 llava loss_utils ministral mistral mixtral mllama muse_glimmer nemotron olmo2 "
    "olmo3 output_classes paligemma phi3 pixtral qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe "
    "qwen3_next qwen3_vl qwen3_vl_moe smollm3 smolvlm"
)
_OPS = (
    "attn_res backends backends.registry cross_entropy dyt experimental experimental.embedding "
    "experimental.mm_int8int2 fused_add_rms_norm fused_ce_tvd fused_linear_cross_entropy fused_linear_jsd "
    "fused_linear_kl_div fused_linear_scaled_cross_entropy fused_moe fused_moe_kernels fused_neighborhood_attention "
    "geglu group_norm grpo_loss jsd kl_div layer_norm llama4_rope mhc mlp modulated_rms_norm multi_token_attention "
    "poly_norm qwen2vl_mrope relu_squared rms_norm rope softmax sparsemax swiglu tiled_mlp tvd utils "
    "vocab_parallel_cross_entropy"
)
#: The modules that can be imported, by their path in ``liger_kernel``.
MODULES = frozenset(
    {"chunked_loss", "chunked_loss.functional", "functional", "ops", "transformers", "utils"}
    | {f"chunked_loss.{name}_loss" for name in _CHUNKED.split()}
    | {f"chunked_loss.fused_linear_{name}" for name in _BASES.split()}
    | {f"transformers.{name}" for name in _LAYERS.split()}
    | {f"transformers.model.{name}" for name in _MODELS.split()}
    | {f"ops.{name}" for name in _OPS.split()}
)

#: The autograd functions, by the module in which each is; ``functions`` has them all.
_FUNCTIONS = {
    "cross_entropy": "LigerCrossEntropyFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "geglu": "LigerGELUMulFunction",
    "group_norm": "LigerGroupNormFunction",
    "jsd": "LigerJSDFunction",
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "mlp": "LigerMLPFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "softmax": "LigerSoftmaxFunction",
    "swiglu": "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction",
    "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    "tvd": "LigerTVDLossFunction",
}
_LOSS_FUNCTIONS = {
    "cosine_similarity_loss": "LigerFusedLinearCosineSimilarityFunction",
    "cpo_loss": "LigerFusedLinearCPOFunction",
    "dpo_loss": "LigerFusedLinearDPOFunction",
    "grpo_loss": "LigerFusedLinearGRPOFunction",
    "jsd_loss": "LigerFusedLinearJSDFunction",
    "kto_loss": "LigerFusedLinearKTOFunction",
    "orpo_loss": "LigerFusedLinearORPOFunction",
    "simpo_loss": "LigerFusedLinearSimPOFunction",
}
_HELPERS = (
    "amp_custom_bwd amp_custom_fwd calculate_settings compare_version device_context ensure_contiguous "
    "get_amp_custom_fwd_bwd infer_device is_hip is_npu_available torch_to_triton_dtype"
)
_UTILITIES = (
    "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device is_npu_available is_peft_available "
    "transformers_version_dispatch"
)
_FORMS = (
    "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd kl_div layer_norm rms_norm "
    "rope softmax swiglu"
)
_FUSED_STEPS = "fused_linear_cross_entropy_backward fused_linear_cross_entropy_forward"
_OURS = "liger_registry.transformers"
_HERE = "liger_registry.drop_in"


def _all(words: dict[str, str]) -> str:
    return " ".join(words.values())


def _more() -> dict[str, dict[str, str]]:
    """For each module the names that ours under the same path has not, with the module that has them."""
    functions, losses = f"{_HERE}.functions", f"{_HERE}.loss_functions"
    lists: list[tuple[str, str, str]] = [
        ("functional", _FORMS, f"{_HERE}.functional"),
        ("utils", _UTILITIES, f"{_HERE}.utils"),
        ("ops", _all(_FUNCTIONS), functions),
        ("ops", _FUSED_STEPS, functions),
        ("ops.fused_linear_cross_entropy", _FUSED_STEPS, functions),
        ("ops.grpo_loss", "fused_selective_log_softmax", functions),
        ("transformers.grpo_loss", "fused_selective_log_softmax", functions),
        ("ops.backends", "IMPL_REGISTRY LIGER_KERNEL_IMPL_ENV", f"{_HERE}.utils"),
        ("ops.backends.registry", "IMPL_REGISTRY LIGER_KERNEL_IMPL_ENV", f"{_HERE}.utils"),
        ("transformers", "is_transformers_available", f"{_HERE}.utils"),
        ("transformers.functional", _all(_FUNCTIONS), functions),
        ("transformers.tiled_mlp", "LigerGELUMulFunction LigerSiLUMulFunction", functions),
        ("transformers.fsdp", "_FSDPForwardRedirection", f"{_HERE}.fsdp"),
        ("transformers.trainer.orpo_trainer", "_FSDPForwardRedirection", f"{_HERE}.fsdp"),
        ("transformers.trainer.orpo_trainer", "LigerFusedLinearORPOLoss", "liger_registry.chunked_loss.orpo_loss"),
        ("transformers.model.llama", "_FSDPForwardRedirection", f"{_HERE}.fsdp"),
        ("transformers.model.smollm3", "_FSDPForwardRedirection", f"{_HERE}.fsdp"),
        ("transformers.model.llama", "PEFT_AVAILABLE", f"{_HERE}.utils"),
        ("transformers.model.smollm3", "PEFT_AVAILABLE", f"{_HERE}.utils"),
        ("transformers.trainer_integration", "_apply_liger_kernel", f"{_OURS}.monkey_patch"),
        ("transformers.auto_model", "MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel", f"{_OURS}.monkey_patch"),
        ("transformers.monkey_patch", "PEFT_AVAILABLE", f"{_HERE}.utils"),
        ("transformers.monkey_patch", "IS_TRANSFORMERS_V5_OR_LATER transformer_version", f"{_HERE}.utils"),
        ("chunked_loss.functional", _all(_LOSS_FUNCTIONS), losses),
        ("chunked_loss.fused_linear_distillation", "LigerFusedLinearDistillationBase", f"{_HERE}.distillation"),
        ("chunked_loss.cosine_similarity_loss", "LigerFusedLinearDistillationBase", f"{_HERE}.distillation"),
        ("chunked_loss.jsd_loss", "LigerFusedLinearDistillationBase", f"{_HERE}.distillation"),
    ]
    lists += [
        (f"{package}.{m}", words, functions) for m, words in _FUNCTIONS.items() for package in ("ops", "transformers")
    ]
    lists += [(f"chunked_loss.{m}", words, losses) for m, words in _LOSS_FUNCTIONS.items()]
    lists += [(f"ops.{m}", _HELPERS, f"{_HERE}.utils") for m in _OPS.split() if not m.startswith("backends")]
    losses_of_models = "LigerForCausalLMLoss unpack_cross_entropy_result"
    lists += [(f"transformers.model.{m}", losses_of_models, f"{_OURS}.model.loss_utils") for m in _MODELS.split()]
    # monkey_patch has the names of what it puts in.
    homes = {
        "cross_entropy": "LigerCrossEntropyLoss",
        "functional": "liger_cross_entropy",
        "geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
        "layer_norm": "LigerLayerNorm",
        "qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
        "relu_squared": "LigerReLUSquared",
        "rms_norm": "LigerRMSNorm LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered",
        "rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
        "swiglu": "LigerBlockSparseTop2MLP LigerPhi3SwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer",
    }
    lists += [("transformers.monkey_patch", words, f"{_OURS}.{m}") for m, words in homes.items()]
    found: dict[str, dict[str, str]] = {}
    for module, words, home in lists:
        found.setdefault(module, {}).update(dict.fromkeys(words.split(), home))
    return found


_MORE = _more()


@functools.cache
def _ours(module: str) -> ModuleType | None:
    """Our module under the same path, if there is one."""
    if module.partition(".")[0] not in ("chunked_loss", "transformers"):
        return None
    name = f"liger_registry.{module}"
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent that we have not
        return None
    return None if found is None else importlib.import_module(name)


def target(module: str, name: str) -> tuple[str, str] | None:
    """The module and the name there that answer for a name of liger-kernel; None if there are none.

    Args:
        module: its path in ``liger_kernel``, "" for the package.
        name: an attribute, no submodule.
    """
    home = _MORE.get(module, {}).get(name)
    if home is not None:
        return home, name
    ours = None if f"{module}.{name}" in MODULES else _ours(module)
    if ours is None or (name.startswith("_") and not name.startswith("_apply_liger_kernel")):
        return None
    return (ours.__name__, name) if hasattr(ours, name) else None


def offered(module: str) -> list[str]:
    """The names that a star import brings, and that ``dir`` lists."""
    found = set(_MORE.get(module, {}))
    ours = _ours(module)
    if ours is not None:
        own = getattr(ours, "__all__", None) or [
            name for name, value in vars(ours).items() if getattr(value, "__module__", "").startswith("liger_registry.")
        ]
        found.update(name for name in own if not name.startswith("_"))
    if module in ("transformers", "transformers.monkey_patch"):
        from liger_registry.transformers.monkey_patch import FUNCTIONS, PREFIX

        found.update(PREFIX + name for name in FUNCTIONS)
        found.update(("_apply_liger_kernel", "_apply_liger_kernel_to_instance"))
    return sorted(found)
