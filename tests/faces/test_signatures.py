"""Signatures are those of liger-kernel 0.8.5: names, order and defaults, as read from its wheel."""

from __future__ import annotations

import importlib
import inspect

import pytest

# module:name to parameters; those of functions, constructors and forwards.
SIGNATURES = {
    "functional:liger_cross_entropy": (
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        "label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, "
        "return_token_accuracy=False, return_predicted_tokens=False"
    ),
    "functional:liger_fused_linear_cross_entropy": (
        "input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, "
        "label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False, accum_dtype=None, "
        "use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, "
        "chunk_mem_const=1"
    ),
    "functional:liger_fused_linear_jsd": (
        "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, "
        "ignore_index=-100, temperature=1.0, accum_dtype=None"
    ),
    "functional:liger_geglu": "a, b",
    "functional:liger_group_norm": "X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps",
    "functional:liger_jsd": "input, target, shift_labels=None, beta=0.5, ignore_index=-100",
    "functional:liger_kl_div": (
        "input, target, size_average=True, reduce=True, reduction='mean', log_target=False, eps=1e-10"
    ),
    "functional:liger_tvd": "input, target, shift_labels=None, reduction='mean', ignore_index=-100",
    "functional:liger_layer_norm": "X, W, B, eps",
    "functional:liger_qwen2vl_mrope": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
    "functional:liger_relu_squared": "x",
    "functional:liger_rms_norm": "X, W, eps, offset=0.0, casting_mode='llama', in_place=True",
    "functional:liger_fused_add_rms_norm": "X, R, W, eps, offset=0.0, casting_mode='llama', in_place=True",
    "functional:liger_rope": "q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None",
    "functional:liger_swiglu": "a, b",
    "functional:liger_softmax": "x",
    "rms_norm:LigerRMSNorm.__init__": (
        "hidden_size, eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones', in_place=True, "
        "row_mode=None, elementwise_affine=True"
    ),
    "rms_norm:LigerRMSNorm.forward": "hidden_states",
    "rms_norm:LigerRMSNormForGemma.__init__": (
        "hidden_size, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=True, row_mode=None"
    ),
    "rms_norm:LigerRMSNormForGemma.forward": "hidden_states",
    "rms_norm:LigerRMSNormForGemma2.__init__": (
        "hidden_size, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=False, row_mode=None"
    ),
    "rms_norm:LigerRMSNormForGemma2.forward": "hidden_states",
    "rms_norm:LigerRMSNormForGemma3.__init__": (
        "dim, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=False"
    ),
    "rms_norm:LigerRMSNormForGemma3.forward": "hidden_states",
    "rms_norm:LigerRMSNormForGemma4.__init__": (
        "dim, eps=1e-06, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, with_scale=True"
    ),
    "rms_norm:LigerRMSNormForGemma4.forward": "hidden_states",
    "rms_norm:LigerRMSNormForMuseGlimmer.__init__": (
        "dim=None, eps=1e-06, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, with_scale=True"
    ),
    "rms_norm:LigerRMSNormForMuseGlimmer.forward": "hidden_states",
    "rms_norm:LigerRMSNormForMuseGlimmerTextCentered.__init__": (
        "hidden_size, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=False, row_mode=None"
    ),
    "rms_norm:LigerRMSNormForMuseGlimmerTextCentered.forward": "hidden_states",
    "rms_norm:LigerRMSNormForOlmo2.__init__": (
        "hidden_size, eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones', in_place=False, row_mode=None"
    ),
    "rms_norm:LigerRMSNormForOlmo2.forward": "hidden_states",
    "rms_norm:LigerRMSNormForGlm4.__init__": (
        "hidden_size, eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones', in_place=False, row_mode=None"
    ),
    "rms_norm:LigerRMSNormForGlm4.forward": "hidden_states",
    "rms_norm:LigerRMSNormForQwen3Next.__init__": (
        "hidden_size, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=False, row_mode=None"
    ),
    "rms_norm:LigerRMSNormForQwen3Next.forward": "hidden_states",
    "layer_norm:LigerLayerNorm.__init__": (
        "hidden_size, eps=1e-06, bias=False, init_fn='ones', impl=None, mode=None, backend=None"
    ),
    "layer_norm:LigerLayerNorm.forward": "hidden_states",
    "group_norm:LigerGroupNorm.__init__": "num_channels, num_groups, eps=1e-06, bias=False, init_fn='ones'",
    "group_norm:LigerGroupNorm.forward": "hidden_states",
    "fused_add_rms_norm:LigerFusedAddRMSNorm.__init__": (
        "hidden_size, eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones', in_place=False"
    ),
    "fused_add_rms_norm:LigerFusedAddRMSNorm.forward": "hidden_states, residual",
    "swiglu:LigerSwiGLUMLP.__init__": "config, intermediate_size=None",
    "swiglu:LigerSwiGLUMLP.forward": "x",
    "swiglu:LigerSwiGLUMLPForMuseGlimmer.__init__": "config",
    "swiglu:LigerSwiGLUMLPForMuseGlimmer.forward": "x",
    "swiglu:LigerBlockSparseTop2MLP.__init__": "config",
    "swiglu:LigerBlockSparseTop2MLP.forward": "x",
    "swiglu:LigerPhi3SwiGLUMLP.__init__": "config",
    "swiglu:LigerPhi3SwiGLUMLP.forward": "x",
    "swiglu:LigerQwen3MoeSwiGLUMLP.__init__": "config, intermediate_size=None",
    "swiglu:LigerQwen3MoeSwiGLUMLP.forward": "x",
    "swiglu:LigerFalconH1SwiGLUMLP.__init__": "config",
    "swiglu:LigerFalconH1SwiGLUMLP.forward": "x",
    "geglu:LigerGEGLUMLP.__init__": "config",
    "geglu:LigerGEGLUMLP.forward": "x",
    "mlp:LigerMLP.__init__": "config",
    "mlp:LigerMLP.forward": "x",
    "mlp:LigerFalconH1MLP.__init__": "config",
    "mlp:LigerFalconH1MLP.forward": "x",
    "tiled_mlp:LigerTiledGEGLUMLP.__init__": "config, num_shards=None",
    "tiled_mlp:LigerTiledGEGLUMLP.forward": "x",
    "tiled_mlp:LigerTiledSwiGLUMLP.__init__": "config, num_shards=None",
    "tiled_mlp:LigerTiledSwiGLUMLP.forward": "x",
    "softmax:LigerSoftmax.__init__": "",
    "softmax:LigerSoftmax.forward": "x",
    "relu_squared:LigerReLUSquared.__init__": "",
    "relu_squared:LigerReLUSquared.forward": "x",
    "rope:liger_rotary_pos_emb": "q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None",
    "rope:liger_rotary_pos_emb_gpt_oss": "q, k, cos, sin",
    "rope:liger_rotary_pos_emb_vision": "q, k, cos, sin",
    "llama4_rope:liger_llama4_text_rotary_pos_emb": "xq, xk, freqs_cis",
    "llama4_rope:liger_llama4_vision_rotary_pos_emb": "query, key, freqs_ci",
    "qwen2vl_mrope:liger_multimodal_rotary_pos_emb": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
    "cross_entropy:LigerCrossEntropyLoss.__init__": (
        "weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', "
        "softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False"
    ),
    "cross_entropy:LigerCrossEntropyLoss.forward": "_input, target",
    "fused_linear_cross_entropy:LigerFusedLinearCrossEntropyLoss.__init__": (
        "ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', "
        "softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, "
        "return_token_accuracy=False, return_predicted_tokens=False"
    ),
    "fused_linear_cross_entropy:LigerFusedLinearCrossEntropyLoss.forward": "lin_weight, _input, target, bias=None",
    "jsd:LigerJSD.__init__": "beta=0.5, ignore_index=-100",
    "jsd:LigerJSD.forward": "log_q, log_p, shift_labels=None",
    "kl_div:LigerKLDIVLoss.__init__": "eps=1e-10, *args, **kwargs",
    "kl_div:LigerKLDIVLoss.forward": "y_pred, y_true",
    "tvd:LigerTVDLoss.__init__": "reduction='batchmean', ignore_index=-100",
    "tvd:LigerTVDLoss.forward": "p, q, shift_labels=None",
    "fused_linear_jsd:LigerFusedLinearJSD.__init__": (
        "jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None"
    ),
    "fused_linear_jsd:LigerFusedLinearJSD.forward": (
        "student_input, student_weight, teacher_input, teacher_weight, shift_labels"
    ),
    "model.loss_utils:unpack_cross_entropy_result": "result",
    "model.loss_utils:fixed_fused_linear_cross_entropy": (
        "hidden_states, lm_head_weight, target, num_items_in_batch=None, ignore_index=-100, "
        "final_logit_softcapping=None, accum_dtype=None, return_token_accuracy=False, "
        "return_predicted_tokens=False, **kwargs"
    ),
    "model.loss_utils:LigerForCausalLMLoss": (
        "hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, "
        "shift_labels=None, final_logit_softcapping=None, return_token_accuracy=False, "
        "return_predicted_tokens=False, **kwargs"
    ),
}
# Parameters behind liger-kernel's ``**kwargs`` have names here, and take no positions.
NAMED = {
    "model.loss_utils:fixed_fused_linear_cross_entropy": {
        "bias",
        "ce_weight",
        "lse_square_scale",
        "label_smoothing",
        "use_token_scaling",
    }
}
# Required by liger-kernel, whose examples leave it out.
OPTIONAL = {("fused_linear_jsd:LigerFusedLinearJSD.forward", "shift_labels")}


def found(path):
    module, name = path.split(":")
    value = importlib.import_module(f"liger_registry.transformers.{module}")
    for part in name.split("."):
        value = getattr(value, part)
    parameters = list(inspect.signature(value).parameters.values())
    return parameters[1:] if "." in name else parameters


def written(parameter):
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{star}{parameter.name}{default}"


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters_have_their_names_order_and_defaults(path):
    ours = [p for p in found(path) if p.kind is not p.KEYWORD_ONLY]
    named = {p.name for p in found(path) if p.kind is p.KEYWORD_ONLY}
    texts = [p.name if (path, p.name) in OPTIONAL else written(p) for p in ours]
    expected = SIGNATURES[path]
    if path in NAMED:
        expected = expected.removesuffix(", **kwargs")
    assert ", ".join(texts) == expected
    assert named == NAMED.get(path, set())


def test_every_layer_and_loss_is_found_in_its_module():
    for path in SIGNATURES:
        module, name = path.split(":")
        home = importlib.import_module(f"liger_registry.transformers.{module}")
        assert getattr(home, name.split(".")[0]).__module__ == home.__name__
