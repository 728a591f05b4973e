"""Why names of liger-kernel 0.8.5 are not offered, and settings of it that are without effect."""

from __future__ import annotations

import os
import re
import warnings

from liger_registry.errors import RegistryWarning

_NO_OP = "the registry has no such operation"
_STEP = "it is half of an autograd function and returns its kernels' launch parameters; the function's apply is offered"
_DETAIL = "it is a detail of liger-kernel's own kernels"
_MODEL = "it is a model's forward written anew; models keep theirs, and apply_liger_kernel_to_* changes what they call"
_OUTPUT = "models return the outputs of their own modeling files"
_OWN_LOSS = (
    "a loss of one's own is a function here, given to LinearPreferenceLoss or LinearDistillationLoss of "
    "liger_registry.chunked_loss"
)
_CHOICE = "the registry chooses implementations itself, from tables; liger_registry.registry.use pins one"
_PATCH = "it rewrites classes or globals of modeling files; apply_liger_kernel_to_* binds on instances"
_POLICY = "policy losses are computed from hidden states here: LigerFusedLinearGRPOLoss"
_PACKAGE = "the registry has nothing for it"
_LOGGER = "it is liger-kernel's logger"

# Ways to spell what there is no operation for, as parts of classes and of functions.
_OPS = (
    r"AttnRes|DyT|Embedding|FusedCETVD|FusedLinearKLDiv|FusedLinearScaledCrossEntropy(TP)?|FusedMoE|"
    r"FusedNeighborhoodAttention|MHC(Coeffs|Pre|PostRes)?|ModulatedRMSNorm|MultiTokenAttention|PolyNorm|Sparsemax|"
    r"VocabParallelC(rossEntropy|E)"
)
_OP_FUNCTIONS = (
    r"attn_res|dyt|fused_linear_kl_div|fused_linear_scaled_cross_entropy_tp|fused_neighborhood_attention|mhc_\w+|"
    r"modulated_rms_norm|multi_token_attention|poly_norm|sparsemax"
)
_DETAILS = (
    "BLOCK_M_TOKEN DTYPE_SUPPORT_LIST LOG2_E MAX_FUSED_SIZE REDUCTION_LITERAL TensorDescriptor "
    "compute_routing_metadata declare_op_locations dispatch gemm_swiglu get_autotune_config get_bucket_m "
    "get_npu_core_count get_num_warps infer_device_arch matmul pack_weights set_large_grf_mode silu unpack_weights "
    "validate_formula_and_mode"
)
# The pattern of a module's path, that of a name, and the reason; the first that fits counts.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (r".*", r"logger", _LOGGER),
    (r"", r"(available|get|set)_(backend|impl)s?", _CHOICE),
    (r"", r"backends", _CHOICE),
    (r"", r"env_report", "liger-tune doctor prints what a report needs"),
    (r"", r"megatron|testing|triton", _PACKAGE),
    (r"ops\.backends(\.registry)?", r"ImplInfo|register_impl|select_impl", _CHOICE),
    (r"ops", r"configure|cute|cutedsl|cutile|_nvidia_shared", _CHOICE),
    (r"ops\.backends", r"_ascend|_cutedsl|_cutile|_triton", _CHOICE),
    (r"ops|transformers", rf"Liger({_OPS}|Experts|ExpertParallelFusedMoe)\w*", _NO_OP),
    (r"(ops|transformers)\..*", rf"Liger({_OPS}|Experts|ExpertParallelFusedMoe)\w*", _NO_OP),
    (r"transformers\..*", rf"liger_({_OP_FUNCTIONS})|moe_fused", _NO_OP),
    (r"ops(\..*)?|transformers\.grpo_loss", r"GrpoLossFunction|triton_grpo_loss", _POLICY),
    (r"transformers\.grpo_loss", r"get_gamma_weights|LigerFusedLinearPPOBase", _POLICY),
    (r"ops(\..*)?", r"\w+_(forward|backward|fwd|bwd)(_triton|_dGU|_dI|_hist)?", _STEP),
    (r"ops\..*", r"\w*_kernel", _DETAIL),
    (r"(functional|ops|transformers)(\..*)?|utils", "|".join(_DETAILS.split()), _DETAIL),
    (r"transformers\.model\..*", r"\w*forward\w*|lce_maybe_trainable_lm_head", _MODEL),
    (r"transformers\.monkey_patch", r"\w+_lce_forward", _MODEL),
    (r"transformers\.model\..*", r"Liger\w+Output\w*", _OUTPUT),
    (r"transformers\.monkey_patch", r"MIN_SUPPORTED_TRANSFORMERS_VERSION", "pip has checked transformers' version"),
    (r"transformers\.llama4_rope", r"apply_liger_llama4_rope_full", _PATCH),
    (r"transformers\.monkey_patch", r"_(patch|bind)_\w+", _PATCH),
    (
        r"transformers\.trainer(\.orpo_trainer)?",
        r"LigerORPOTrainer",
        "it is written for an ORPOTrainer that TRL has changed since; LigerFusedLinearORPOLoss is offered",
    ),
    (r"chunked_loss\..*", r"LigerFusedLinear(Distillation|PPO|Preference|UnpairedPreference)Base", _OWN_LOSS),
    (r"chunked_loss\.grpo_loss", r"clip_coef_fn|get_gamma_weights|k3_loss_fn|sapo_loss_fn", _POLICY),
)
# What users choose liger-kernel's kernels with.
_SETTINGS = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND")


def reason(module: str, name: str) -> str:
    """Why a name is not offered; "" for one that liger-kernel has not either.

    Args:
        module: its path in ``liger_kernel``, "" for the package.
        name: an attribute or a submodule.
    """
    for of_module, of_name, why in _REASONS:
        if re.fullmatch(of_module, module) and re.fullmatch(of_name, name):
            return why
    return ""


def warn_of_settings() -> None:
    """Say that settings which choose liger-kernel's kernels choose none here."""
    given = [name for name in sorted(os.environ) if name.startswith(_SETTINGS)]
    if given:
        warnings.warn(f"{', '.join(given)} without effect: {_CHOICE}", RegistryWarning, stacklevel=2)
