"""What a config.json says: sizes, families' norms, and errors with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from liger_registry.architecture import PRESETS, Architecture
from liger_registry.errors import ModelConfigError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 77,
    "torch_dtype": "float16",
}


def read(**changes: object) -> Architecture:
    return Architecture.from_config({**LLAMA, **changes})


def write(directory: Path, content: object) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_llama() -> None:
    assert read() == Architecture(
        name="llama",
        model_type="llama",
        hidden=64,
        intermediate=160,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rotary_dim=16,
        vocab=100,
        layers=3,
        norm="rms_norm",
        norm_casting="llama",
        activation="silu",
        max_positions=77,
        dtype="float16",
    )


def test_directory_file_and_mapping_agree(tmp_path: Path) -> None:
    file = write(tmp_path / "my-model", LLAMA)
    for source in (file, file.parent, str(file), str(file.parent)):
        assert (
            Architecture.from_config(source)
            == Architecture.find(str(file))
            == Architecture.from_config(LLAMA, "my-model")
        )


@pytest.mark.parametrize(
    ("model_type", "casting", "offset"),
    [
        ("llama", "llama", 0.0),
        ("mistral", "llama", 0.0),
        ("qwen3", "llama", 0.0),
        ("gemma", "gemma", 1.0),
        ("gemma2", "gemma", 1.0),
        ("gemma3_text", "gemma", 1.0),
        ("qwen3_next", "gemma", 1.0),
        ("gemma3n", "gemma", 0.0),
        ("gemma4", "gemma", 0.0),
        ("olmo2", "none", 0.0),
        ("olmo3", "none", 0.0),
        ("gpt_oss", "none", 0.0),
        ("a-model-of-tomorrow", "llama", 0.0),
    ],
)
def test_norm_of_family(model_type: str, casting: str, offset: float) -> None:
    found = read(model_type=model_type)
    assert (found.norm, found.norm_casting, found.norm_offset) == ("rms_norm", casting, offset)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "olmo2", "qwen3_next"]
)
def test_norm_is_that_of_transformers(model_type: str) -> None:
    """The class itself, in bfloat16, against the formula that the casting names."""
    import importlib

    import torch
    from transformers import CONFIG_MAPPING

    from liger_registry.ops.rms_norm import reference

    package = CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
    module = importlib.import_module(package)
    kind = next(
        v for k, v in vars(module).items() if k.endswith("RMSNorm") and "Text" not in k and v.__module__ == package
    )
    norm = kind(256, eps=1e-6).to(torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.normal_()
    a = read(model_type=model_type)
    ours = reference(x, norm.weight, 1e-6, a.norm_offset, a.norm_casting)
    assert torch.equal(norm(x), ours)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("qwen3", True), ("qwen3_moe", True), ("gemma3_text", True), ("llama", False), ("olmo2", False), ("qwen2", False)],
)
def test_query_and_key_norm_over_the_head_size(model_type: str, expected: bool) -> None:
    assert read(model_type=model_type).qk_norm is expected


def test_query_and_key_norm_that_the_config_switches() -> None:
    assert read(model_type="glm4_moe").qk_norm is False
    assert read(model_type="glm4_moe", use_qk_norm=True).qk_norm is True


def test_names_of_gpt2() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 6,
        "n_positions": 1024,
        "n_inner": None,
        "vocab_size": 50257,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    }
    found = Architecture.from_config(config)
    assert (found.hidden, found.intermediate, found.heads, found.kv_heads, found.head_dim) == (768, 3072, 12, 12, 64)
    assert (found.norm, found.layers, found.max_positions, found.rotary_dim) == ("layer_norm", 6, 1024, 0)
    assert (found.activation, found.dtype) == ("gelu_new", "bfloat16")


def test_nested_text_config_wins_and_inherits_the_rest() -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    config = {
        "model_type": "llava",
        "text_config": inner,
        "dtype": "float32",
        "hidden_size": 9,
        "vision_config": {"a": 1},
    }
    found = Architecture.from_config(config)
    assert (found.model_type, found.hidden, found.dtype) == ("llama", 64, "float32")


def test_experts() -> None:
    found = read(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    assert (found.experts, found.experts_per_token, found.intermediate) == (8, 2, 32)


@pytest.mark.parametrize(
    ("config", "rotary"),
    [
        ({"partial_rotary_factor": 0.5}, 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, 4),
        ({"rope_parameters": {"rope_theta": 1e4}}, 16),
        ({"rotary_dim": 6}, 6),
        ({"model_type": "glm4"}, 64),  # half of that family's default head size
    ],
)
def test_partial_rotary(config: dict[str, object], rotary: int) -> None:
    assert read(**config).rotary_dim == rotary


@pytest.mark.parametrize(
    ("value", "expected"),
    [("bfloat16", "bfloat16"), ("torch.float32", "float32"), ("auto", "bfloat16"), (None, "bfloat16")],
)
def test_dtype_under_either_name(value: str | None, expected: str) -> None:
    assert read(torch_dtype=value).dtype == expected
    assert read(dtype="float64", torch_dtype=value).dtype == "float64"


def test_sizes_by_layer_count_by_their_largest() -> None:
    assert read(num_key_value_heads=[1, 4, 2]).kv_heads == 4


@pytest.mark.parametrize(
    ("missing", "value"),
    [
        *(("hidden_size", value) for value in (None, 0, -1, True, "4096", 1.5, [], {}, 1 << 60)),
        *(("vocab_size", value) for value in (-1, True, "4096", 1.5, [], {}, 1 << 60)),
    ],
)
def test_too_little_says_which_key_and_the_way_out(missing: str, value: object) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(**{missing: value})
    assert missing in caught.value.what
    assert "use_diff=False" in caught.value.fix


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"model_type": "unheard-of"})
    with pytest.raises(ModelConfigError, match="hidden_size") as caught:
        Architecture.from_config(path)
    assert str(path) in caught.value.what


def test_only_the_hidden_size_is_needed() -> None:
    found = Architecture.from_config({"model_type": "unheard-of", "hidden_size": 64, "rms_norm_eps": 1e-6})
    assert (found.hidden, found.vocab, found.norm) == (64, 0, "rms_norm")


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_number_that_no_float_holds_is_passed_over(value: float) -> None:
    assert read(final_logit_softcapping=value).softcap == 0.0


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "[" * 100_000, "\x00\xff"])
def test_a_file_that_is_no_config(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelConfigError):
        Architecture.from_config(write(tmp_path / "m", content))


def test_a_missing_file_and_a_name_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json.* cannot be read"):
        Architecture.from_config(tmp_path)
    with pytest.raises(ModelConfigError) as caught:
        Architecture.find("llama-7")
    assert "llama-3-8b" in caught.value.candidates


def test_presets() -> None:
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert Architecture.preset(name.upper()) is preset
        assert min(preset.hidden, preset.intermediate, preset.heads, preset.kv_heads, preset.layers, preset.vocab) > 0
        assert preset.heads % preset.kv_heads == 0
    gemma = PRESETS["gemma-2-9b"]
    assert (gemma.hidden, gemma.head_dim, gemma.vocab, gemma.softcap) == (3584, 256, 256000, 30.0)
    assert (gemma.norm_casting, gemma.norm_offset) == ("gemma", 1.0)
    mixtral = PRESETS["mixtral-8x7b"]
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.vocab) == (8, 2, 32000)
    assert PRESETS["qwen3-0.6b"].qk_norm
    assert (PRESETS["llama-3-8b"].head_dim, PRESETS["qwen3-0.6b"].head_dim) == (128, 128)


def test_it_does_not_import_torch() -> None:
    code = "import sys, liger_registry.architecture; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
