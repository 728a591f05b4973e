"""What a model's ``config.json`` says about the sizes and formulas of its layers.

Warmup asks each operation which calls an architecture makes; a table of presets names a few public models, so that
nothing need be downloaded. Sizes that a model does not have are 0.

Which formula a family's norm uses is not in its config. It was read from the ``forward`` of the norms in transformers
5.24: most round before the weight (``llama``), and the families below do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from liger_registry.errors import ModelConfigError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# y = round(x32 * rstd * (1 + weight32)).
_OFFSET_NORM = _names(
    "gemma gemma2 gemma3 minimax_m3_vl qwen3_5 qwen3_5_moe qwen3_next qwen4_exp recurrent_gemma step3p7 "
    "t5gemma t5gemma2 vaultgemma"
)
# y = round(x32 * rstd * weight32): the roundings of Gemma without its offset.
_WIDE_NORM = _names("gemma3n gemma4 gemma4_unified helium kyutai_speech_to_text lara_mini moshi nemotron_h")
# y = round(weight * (x32 * rstd)), where the product is promoted to fp32.
_LATE_NORM = _names("afmoe beam deepseek_v4 flex_olmo flint gpt_oss inkling2 inkling2_loop olmo2 olmo3 olmo_hybrid")
# No norm_eps key to tell them by, or one whose name speaks of a layer norm.
_RMS_NORM = _names(
    "bailing_hybrid blt falcon_mamba hrm_text lfm2 lfm2_moe lfm3 mamba mamba2 mimo_v2_flash mt5 nanochat nemotron_h t5 "
    "umt5 xlstm"
)
_LAYER_NORM = _names(
    "bart biogpt bloom codegen cohere cohere2 cohere2_moe dbrx falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj jais2 mpt "
    "nemotron olmo opt persimmon phi phimoe stablelm starcoder2 whisper xglm"
)
# A norm with a weight over the head size of queries and keys. Norms over a whole projection (OLMo 2, MiniMax M2) are
# left to what a real run misses.
_QK_NORM = _names(
    "afmoe apertus apertus1p5 beam doge dots1 exaone4 exaone4_5 exaone_moe flint gemma3 gemma3n gemma4 "
    "gemma4_unified hunyuan_v1_dense hunyuan_v1_moe hy_v3 inkling kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 "
    "mellum minimax_m3_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen4_exp step3p7 "
    "t5gemma2"
)
# The default of head_dim where it is not hidden / heads.
_HEAD_DIM = {
    **dict.fromkeys(("ernie4_5", "glm", "glm4", "hy_v3", "minimax_m2", "qwen3", "qwen3_moe", "seed_oss"), 128),
    **dict.fromkeys(_names("gemma gemma2 gemma3 gemma3n gemma4 qwen3_5 qwen3_5_moe qwen3_next vaultgemma"), 256),
    "gpt_oss": 64,
}
# The part of a head that is rotated, where the config leaves it out.
_ROTARY = {
    **dict.fromkeys(("gpt_neox", "qwen3_5", "qwen3_5_moe", "qwen3_next", "stablelm"), 0.25),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "nemotron", "persimmon", "phi"), 0.5),
}
# What tells that a model with layer norms rotates at all; nearly all with RMS norms do.
_ROTATES = _names("partial_rotary_factor rope_parameters rope_scaling rope_theta rotary_dim rotary_emb_base rotary_pct")
# The MLP is four times as wide as the model where the config leaves it out.
_QUADRUPLE = _names("bloom codegen gpt2 gpt_bigcode gpt_neo gptj mpt")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "multi_query_group_num")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", "decoder_ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_target_positions")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_ACTIVATION = ("hidden_activation", "hidden_act", "activation_function", "activation", "hidden_acts")
_LARGEST = 1 << 40


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and formulas of one model's layers.

    Attributes:
        name: what reports call it.
        model_type: the family, as transformers names it.
        hidden: width of the residual stream.
        intermediate: width of the gated MLP, of one expert where there are several.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of one head.
        rotary_dim: how much of a head is rotated.
        vocab: rows of the output head; 0 where the config does not tell.
        layers: decoder layers.
        norm: ``rms_norm``, ``layer_norm``, or empty where the config does not tell.
        norm_casting: where an RMS norm rounds: ``llama``, ``gemma`` or ``none``; see ``ops/rms_norm.py``.
        norm_offset: what it adds to its weight.
        qk_norm: queries and keys are normalised over the head size.
        activation: the MLP's, such as ``silu``.
        experts: experts a layer; 0 for a dense model.
        experts_per_token: how many of them see one token.
        softcap: the soft cap of the final logits; 0 for none.
        max_positions: the longest sequence it was made for.
        dtype: its checkpoint's; ``bfloat16`` where the config does not say.
    """

    name: str
    model_type: str
    hidden: int
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    vocab: int = 0
    layers: int = 0
    norm: str = ""
    norm_casting: str = "llama"
    norm_offset: float = 0.0
    qk_norm: bool = False
    activation: str = ""
    experts: int = 0
    experts_per_token: int = 0
    softcap: float = 0.0
    max_positions: int = 0
    dtype: str = "bfloat16"

    @classmethod
    def from_config(cls, source: str | Path | Mapping[str, Any], name: str = "") -> Architecture:
        """The architecture that a Hugging Face config describes.

        Args:
            source: a model directory, the path of a ``config.json``, or its content.
            name: what reports call it; by default the directory's name, else the model type.

        Raises:
            ModelConfigError: it cannot be read, or lacks the sizes every model has.
        """
        if isinstance(source, Mapping):
            outer = source
        else:
            outer = _read(Path(source))
            name = name or _directory_name(Path(source))
        config = _text_config(outer)
        place = "" if isinstance(source, Mapping) else f" in {str(source)!r}"
        return _Reader(config, name or str(outer.get("_name_or_path") or ""), place).architecture()

    @classmethod
    def preset(cls, name: str) -> Architecture:
        """The public model of that name.

        Raises:
            ModelConfigError: there is no such preset.
        """
        try:
            return PRESETS[name.lower()]
        except KeyError:
            raise ModelConfigError(
                f"{name!r} is neither a preset nor a model directory nor a config.json",
                candidates=PRESETS,
                fix="name a preset, or give the path of a directory that holds a config.json",
            ) from None

    @classmethod
    def find(cls, source: str) -> Architecture:
        """The architecture that a path or the name of a preset stands for; a path wins.

        Raises:
            ModelConfigError: it is neither, or the config cannot be used.
        """
        try:
            there = Path(source).exists()
        except OSError:  # longer than a path may be
            there = False
        return cls.from_config(source) if there else cls.preset(source)

    def with_dtype(self, dtype: str) -> Architecture:
        """The same architecture in another dtype."""
        return replace(self, dtype=dtype)


def _directory_name(path: Path) -> str:
    path = path.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(
            f"the model config {str(file)!r} cannot be read",
            why=error.strerror or str(error),
            fix="give a directory that holds a config.json, the path of that file, or the name of a preset",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(
            f"the model config {str(file)!r} is no JSON", why=str(error), fix="download the model's config.json again"
        ) from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise ModelConfigError(
            f"the model config {str(file)!r} is no JSON object",
            why=f"it is a {kind}",
            fix="name a model's config.json, or the directory that holds it",
        )
    return content


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, with what stands only outside it, such as the dtype."""
    for key in _TEXT_CONFIGS:
        if isinstance(inner := config.get(key), Mapping):
            return {**{k: v for k, v in config.items() if k != key}, **_text_config(inner)}
    return config


class _Reader:
    """Reads one config; keeps it for the error messages."""

    def __init__(self, config: Mapping[str, Any], name: str, place: str = "") -> None:
        self.config, self.place = config, place
        self.model_type = str(config.get("model_type") or "")
        self.name = name or self.model_type or "model"
        # "gemma3_text" inside "gemma3": the same layers.
        self.family = self.model_type.removesuffix("_text")

    def architecture(self) -> Architecture:
        hidden = self.size(_HIDDEN, required=True)
        vocab = self.size(("vocab_size", "padded_vocab_size"))
        heads = self.size(_HEADS)
        # Falcon and GPT-BigCode: one head of keys and values, whatever the count beside it says.
        single = self.config.get("multi_query") is True and not self.config.get("new_decoder_architecture")
        kv_heads = 1 if single else self.size(_KV_HEADS) or heads
        head_dim = self.size(("head_dim", "d_kv", "kv_channels"))
        head_dim = head_dim or _HEAD_DIM.get(self.family, 0) or (hidden // heads if heads else 0)
        experts = self.size(_EXPERTS)
        norm, casting, offset = self.norm()
        return Architecture(
            name=self.name,
            model_type=self.model_type,
            hidden=hidden,
            intermediate=self.intermediate(hidden, experts),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=self.rotary(head_dim) if norm == "rms_norm" or _ROTATES & set(self.config) else 0,
            vocab=vocab,
            layers=self.size(_LAYERS),
            norm=norm,
            norm_casting=casting,
            norm_offset=offset,
            qk_norm=self.qk_norm() and norm == "rms_norm" and heads > 0,
            activation=str(self.first(_ACTIVATION) or ""),
            experts=experts,
            experts_per_token=self.size(_EXPERTS_USED) if experts else 0,
            softcap=self.number("final_logit_softcapping", 0.0),
            max_positions=self.size(_POSITIONS),
            dtype=self.dtype(),
        )

    def first(self, keys: Iterable[str]) -> Any:  # noqa: ANN401 - a JSON value of any kind
        return next((v for k in keys if (v := self.config.get(k)) is not None), None)

    def size(self, keys: Iterable[str], required: bool = False) -> int:
        """The first of the keys that is there; sizes a layer (a list) count by their largest."""
        value = self.first(keys)
        if isinstance(value, list) and value:
            value = max((v for v in value if type(v) is int), default=None)
        if value is None and not required:
            return 0
        if type(value) is not int or not (1 if required else 0) <= value < _LARGEST:
            keys = tuple(keys)
            raise ModelConfigError(
                f"the model config of {self.name!r}{self.place} has no usable {keys[0]}",
                why="it is missing" if value is None else f"it is {value!r}, not a positive integer",
                candidates=keys,
                fix="write it in full: AutoConfig.from_pretrained(model).to_json_file('config.json', use_diff=False)",
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
        return float(value) if known else default  # type: ignore[arg-type]

    def intermediate(self, hidden: int, experts: int) -> int:
        expert = self.size(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")) if experts else 0
        return expert or self.size(_INTERMEDIATE) or (4 * hidden if self.family in _QUADRUPLE else 0)

    def rotary(self, head_dim: int) -> int:
        if direct := self.size(("rotary_dim",)):
            return min(direct, head_dim)
        parameters = self.config.get("rope_parameters")
        nested = parameters.get("partial_rotary_factor") if isinstance(parameters, Mapping) else None
        part = nested if nested is not None else self.first(("partial_rotary_factor", "rotary_pct"))
        known = isinstance(part, int | float) and 0 <= part <= 1
        return int(head_dim * (part if known else _ROTARY.get(self.family, 1.0)))

    def norm(self) -> tuple[str, str, float]:
        if self.family in _OFFSET_NORM:
            return "rms_norm", "gemma", 1.0
        if self.family in _WIDE_NORM:
            return "rms_norm", "gemma", 0.0
        if self.family in _LATE_NORM:
            return "rms_norm", "none", 0.0
        if self.family in _LAYER_NORM:
            return "layer_norm", "none", 0.0
        if self.family in _RMS_NORM or "rms_norm_eps" in self.config:
            return "rms_norm", "llama", 0.0
        if {"layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon"} & set(self.config):
            return "layer_norm", "none", 0.0
        return "", "none", 0.0

    def qk_norm(self) -> bool:
        declared = self.config.get("use_qk_norm")
        if self.family in ("glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe") and isinstance(declared, bool):
            return declared
        return self.family in _QK_NORM

    def dtype(self) -> str:
        name = str(self.first(("dtype", "torch_dtype")) or "").removeprefix("torch.")
        return name if name in ("bfloat16", "float16", "float32", "float64") else "bfloat16"


# name: model type, hidden, intermediate, heads, kv heads, head size, vocabulary, layers, positions, activation, more.
_PUBLIC: dict[str, tuple[str, int, int, int, int, int, int, int, int, str, dict[str, Any]]] = {
    "gemma-2-2b": ("gemma2", 2304, 9216, 8, 4, 256, 256000, 26, 8192, "gelu_pytorch_tanh", {"cap": 30.0}),
    "gemma-2-9b": ("gemma2", 3584, 14336, 16, 8, 256, 256000, 42, 8192, "gelu_pytorch_tanh", {"cap": 30.0}),
    "gemma-3-1b": ("gemma3_text", 1152, 6912, 4, 1, 256, 262144, 26, 32768, "gelu_pytorch_tanh", {}),
    "gpt2": ("gpt2", 768, 3072, 12, 12, 64, 50257, 12, 1024, "gelu_new", {}),
    "llama-3-8b": ("llama", 4096, 14336, 32, 8, 128, 128256, 32, 8192, "silu", {}),
    "llama-3-70b": ("llama", 8192, 28672, 64, 8, 128, 128256, 80, 8192, "silu", {}),
    "llama-3.2-1b": ("llama", 2048, 8192, 32, 8, 64, 128256, 16, 131072, "silu", {}),
    "llama-3.2-3b": ("llama", 3072, 8192, 24, 8, 128, 128256, 28, 131072, "silu", {}),
    "mistral-7b": ("mistral", 4096, 14336, 32, 8, 128, 32000, 32, 32768, "silu", {}),
    "mixtral-8x7b": ("mixtral", 4096, 14336, 32, 8, 128, 32000, 32, 32768, "silu", {"experts": 8, "used": 2}),
    "olmo-2-7b": ("olmo2", 4096, 11008, 32, 32, 128, 100352, 32, 4096, "silu", {}),
    "phi-3-mini": ("phi3", 3072, 8192, 32, 32, 96, 32064, 32, 4096, "silu", {}),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 14, 2, 64, 151936, 24, 32768, "silu", {}),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 4, 128, 152064, 28, 131072, "silu", {}),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 16, 8, 128, 151936, 28, 40960, "silu", {}),
    "qwen3-8b": ("qwen3", 4096, 12288, 32, 8, 128, 151936, 36, 40960, "silu", {}),
}


def _public(name: str) -> Architecture:
    kind, hidden, intermediate, heads, kv_heads, head_dim, vocab, layers, positions, activation, more = _PUBLIC[name]
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "hidden_act": activation,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": more.get("cap"),
        "num_local_experts": more.get("experts"),
        "num_experts_per_tok": more.get("used"),
        "dtype": "bfloat16",
    }
    return Architecture.from_config(config, name)


PRESETS: Mapping[str, Architecture] = MappingProxyType({name: _public(name) for name in _PUBLIC})
