"""Small models of every causal-LM type of the installed transformers, from configs, with random weights.

One set of sizes serves most types: a config takes those whose names it knows, and so do the configs inside it. What a
type needs besides is in ``OVERRIDES``. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

VOCAB = 97
TOKENS = 12
LARGEST = 3e7  # parameters; a model that has more needs overrides

SIZES: dict[str, Any] = {
    # the text
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    # widths
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    # Weights of a size at which attention and gates are far from their linear part.
    "initializer_range": 0.2,
    "init_std": 0.2,
    # layers and heads
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # state spaces
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    # images and sounds
    "image_size": 16,
    "patch_size": 4,
    "depth": 2,
    "num_mel_bins": 16,
}

INKLING = {"unpadded_vocab_size": VOCAB, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
MUSICGEN = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
DOTS3 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
# Encoders are made decoders, as their model for causal language modelling is meant to be.
ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "qdqbert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
)  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    **{model_type: {"is_decoder": True} for model_type in ENCODERS},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_size": [3],
        "encoder_hash_byte_group_vocab": 64,
        "cross_attn_k": 1,
        "patcher_config": {"vocab_size": 260},
        "encoder_config": {"vocab_size": 260, "cross_attn_k": 1, "hidden_size_global": 32},
        "decoder_config": {"vocab_size": 260, "cross_attn_k": 1, "hidden_size_global": 32},
    },
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cpmant": {"dim_ff": 64, "dim_head": 8, "prompt_length": 4, "position_bias_max_distance": 32},
    "ctrl": {"dff": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 6, **DOTS3},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "sparse"]},
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 16,
            "feature_size": 16,
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"output_channels": 16, "mlp_dim": 64, "window_size": 2, "global_attn_indexes": [1]},
    },
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["mamba", "attention"],
        "mamba_chunk_size": 8,
    },
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "inkling2_text": INKLING,
    "inkling2_loop_text": INKLING,
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 1,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "jamba": {"use_mamba_kernels": False, "layer_types": ..., "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "mllama": {"text_config": {"rope_scaling": {"rope_type": "default"}}},
    "moshi": {"audio_vocab_size": VOCAB},
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN,
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8, "n_groups": 2},
    "phi4_multimodal": {"audio_config": {"num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 32}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "roc_bert": {"is_decoder": True, "shape_vocab_size": VOCAB, "pronunciation_vocab_size": VOCAB},
    "transfo-xl": {"cutoffs": [20, 40], "d_embed": 32, "d_head": 8, "d_inner": 64},
    "xlm": {"causal": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {
        "use_mamba_kernels": False,
        "num_hidden_layers": 5,
        "layers_block_type": ...,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# Types that cannot be built, and why; what the installed release lacks is no entry.
DRAFTER = "drafts for another model: its forward takes that model's keys and values, and no labels"
IMPOSSIBLE: dict[str, str] = {"gemma4_assistant": DRAFTER, "gemma4_unified_assistant": DRAFTER}
# Types whose loss can only be differentiated in training.
TRAINED = {"reformer"}
# Types that need a package that the tests do not install.
NEEDS: dict[str, str] = {"gemma3n": "timm", "qdqbert": "pytorch_quantization"}


class Unbuildable(Exception):
    """The type has no small model here; the message says why."""


def names(auto: str = "CAUSAL_LM") -> dict[str, str]:
    """The model types of an auto class, with the classes they make."""
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, f"MODEL_FOR_{auto}_MAPPING_NAMES"))


def known(config_class: type) -> set[str]:
    """The names a config's constructor takes, in both generations of transformers."""
    found = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        found |= {name for name in getattr(base, "__annotations__", {}) if not name.startswith("_")}
    return found - {"self", "kwargs"}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second over the first, level by level."""
    result = dict(first)
    for key, value in second.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return result


def arguments(config_class: type, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What to call a config with: the sizes it knows, inner configs likewise, the changes over them; ... drops one."""
    takes = known(config_class)
    result = {name: value for name, value in SIZES.items() if name in takes}
    if "kv_lora_rank" in takes and "num_key_value_heads" in takes:
        result["num_key_value_heads"] = result["num_attention_heads"]  # latents are shared, keys are not
    result |= layers(config_class, takes)
    for name, inner in inner_configs(config_class).items():
        own = changes.get(name, {})
        model_type = own.get("model_type", inner) if isinstance(own, Mapping) else inner
        if isinstance(own, Mapping) and model_type is not None:
            result[name] = inner_arguments(model_type, own)
    plain = {k: v for k, v in changes.items() if not (isinstance(v, Mapping) and isinstance(result.get(k), Mapping))}
    return {name: value for name, value in merged(result, plain).items() if value is not ...}


def inner_configs(config_class: type) -> dict[str, Any]:
    """The inner configs by name: a config class, a model type, or None if the release has no default for it."""
    from transformers import AutoConfig

    found: dict[str, Any] = {}
    for name, spec in (getattr(config_class, "sub_configs_defaults", None) or config_class.sub_configs).items():
        inner = getattr(spec, "config_class", spec)
        found[name] = getattr(spec, "model_type", None) if inner is AutoConfig else inner
    return found


def inner_arguments(inner: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an inner config, with its model type where only that tells its class."""
    from transformers import CONFIG_MAPPING

    if isinstance(inner, str):
        return {**arguments(CONFIG_MAPPING[inner], merged(OVERRIDES.get(inner, {}), changes)), "model_type": inner}
    own = OVERRIDES.get(getattr(inner, "model_type", ""), {})
    return arguments(inner, merged(own, changes))


def layers(config_class: type, takes: set[str]) -> dict[str, Any]:
    """One layer of each kind that the type has by default, at least two in all."""
    lists = [name for name in ("layer_types", "layers_block_type", "mlp_layer_types") if name in takes]
    try:
        default = config_class()
        kinds = list(dict.fromkeys(zip(*(getattr(default, name) for name in lists), strict=True)))
    except Exception:  # no such lists, or no default
        return {}
    if not lists or not kinds:
        return {}
    kinds = kinds if len(kinds) > 1 else kinds * 2
    return {"num_hidden_layers": len(kinds), **{name: [k[i] for k in kinds] for i, name in enumerate(lists)}}


def small_config(model_type: str, **changes: Any) -> Any:
    """A config of the type with small sizes."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**arguments(config_class, merged(OVERRIDES.get(model_type, {}), changes)))


def small_model(
    model_type: str,
    auto: str = "AutoModelForCausalLM",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> nn.Module:
    """A small model of the type with random weights, in evaluation.

    Raises:
        Unbuildable: it cannot be, or not by these sizes; says why.
    """
    import transformers

    if model_type in IMPOSSIBLE:
        raise Unbuildable(IMPOSSIBLE[model_type])
    if model_type in NEEDS and importlib.util.find_spec(NEEDS[model_type]) is None:
        raise Unbuildable(f"needs the package {NEEDS[model_type]}")
    factory = getattr(transformers, auto)
    with quiet():
        try:
            config = small_config(model_type, **changes)
            model_class = factory._model_mapping[type(config)]
            if model_class.config_class is not type(config):  # the class is of a part: the text, the decoder
                parts = (getattr(config, name) for name in inner_configs(type(config)))
                config = next((part for part in parts if isinstance(part, model_class.config_class)), config)
            size = parameters(model_class, config)
            if size > LARGEST:
                raise Unbuildable(f"{size / 1e6:.0f} M parameters")
            torch.manual_seed(seed)
            model = vary(model_class._from_config(config))
        except Unbuildable:
            raise
        except Exception as error:
            raise Unbuildable(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    return model.to(dtype).train(model_type in TRAINED)


def parameters(model_class: Any, config: Any) -> int:
    """How many parameters a model would have; 0 if it cannot be built without memory."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in model_class._from_config(config).parameters())
    except NotImplementedError:  # it reads numbers while it is built
        return 0


def vary(model: nn.Module) -> nn.Module:
    """Change what is initialised to ones and zeros, so that it matters how it is used."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@contextlib.contextmanager
def quiet():
    """Building small models makes transformers warn of sizes; none of it concerns what is tested."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


def inputs(model: nn.Module, seed: int = 1, batch: int = 2, tokens: int = TOKENS) -> dict[str, Any]:
    """Token ids and labels on the model's device, four of a row ignored; no cache where that can be asked for."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, tokens), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    result: dict[str, Any] = {"input_ids": ids, "labels": labels}
    config = model.config
    if config.model_type == "git":  # it takes the scores of an image's tokens off
        result["pixel_values"] = torch.randn(batch, 3, SIZES["image_size"], SIZES["image_size"], generator=generator)
    if hasattr(config, "num_codebooks") and "Musicgen" in type(model).__name__:
        result["input_ids"] = ids.repeat_interleave(config.num_codebooks, 0)
        result["labels"] = labels[..., None].repeat(1, 1, config.num_codebooks)
    device = next(model.parameters()).device
    result = {name: value.to(device) for name, value in result.items()}
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        result["use_cache"] = False
    return result
