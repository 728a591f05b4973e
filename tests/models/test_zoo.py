"""Every model type, plain and patched: some in each tier and all in the last; and that a wrong patch is noticed."""

from __future__ import annotations

import sys

import comparing
import pytest
import torch
import transformers
import zoo

# One of each family of norms, MLPs, rotations, experts and heads.
FIRST = ["llama", "gemma2", "gpt2", "qwen3", "phi3", "mixtral", "deepseek_v3", "cohere2", "nemotron"]
SECOND = [
    "apertus", "bamba", "bart", "bert", "bloom", "deepseek_v2", "falcon_h1", "gemma", "gemma3_text", "gemma4_text",
    "glm4", "gpt_neox", "gpt_oss", "granitemoe", "jamba", "llama4", "mamba2", "mistral", "modernbert-decoder", "mpt",
    "olmo2", "opt", "phi", "phi4_multimodal", "qwen2", "qwen2_moe", "qwen3_next", "recurrent_gemma", "smollm3",
    "stablelm", "starcoder2",
]  # fmt: skip
if transformers.__version__.startswith("4."):
    # The first is not there yet. The second keeps its state with the graph of the last step, so the plain model cannot
    # be trained twice.
    SECOND = [name for name in SECOND if name not in ("gemma4_text", "recurrent_gemma")]
ALL = list(zoo.names())

# What each release's types come to; more is better, fewer is a regression.
LEAST = {
    5: {"fused_linear_cross_entropy": 140, "rms_norm": 100, "gated": 95, "rope": 95},
    4: {"fused_linear_cross_entropy": 125, "rms_norm": 65, "gated": 60, "rope": 65},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices of 32 columns gain nothing from a second thread, and wait for it."""
    torch.set_num_threads(1)


def same(model_type):
    outcome = comparing.compare(model_type)
    assert not outcome.unbuilt, outcome.unbuilt
    assert "loss" not in outcome.plain, outcome.plain
    assert not outcome.differences, (outcome.differences, outcome.rows)
    assert not [row for row in outcome.rows if "failed:" in row[3]]  # an adapter that raised
    return outcome


@pytest.mark.parametrize("model_type", FIRST)
@pytest.mark.filterwarnings("ignore")
def test_is_the_same_patched(model_type):
    assert "fused_linear_cross_entropy" in same(model_type).ops


@pytest.mark.ci
@pytest.mark.parametrize("model_type", SECOND)
@pytest.mark.filterwarnings("ignore")
def test_is_the_same_patched_too(model_type):
    assert "fused_linear_cross_entropy" in same(model_type).ops


class Off:
    """A replacement that is wrong by little."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        return result * (1 + 1e-4) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("attribute", ["input_layernorm", "mlp"])
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_replacement_is_noticed(attribute, monkeypatch):
    import liger_registry.transformers as faces

    apply = faces.apply

    def wrong(model, **options):
        handle = apply(model, **options)
        module = getattr(model.model.layers[1], attribute)
        module.__dict__["forward"] = Off(module.__dict__["forward"])
        return handle

    monkeypatch.setitem(vars(faces), "apply", wrong)
    assert comparing.compare("llama").differences


def test_a_model_of_the_zoo_is_its_own_whatever_was_built_before():
    one = zoo.small_model("llama")
    zoo.small_model("gpt2")
    torch.rand(3)
    other = zoo.small_model("llama")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert any(not torch.equal(p, torch.ones_like(p)) for n, p in one.named_parameters() if "norm" in n)


def test_a_type_that_cannot_be_built_says_why():
    with pytest.raises(zoo.Unbuildable, match="drafts"):
        zoo.small_model("gemma4_assistant")
    assert comparing.compare("gemma4_assistant").unbuilt


@pytest.mark.parametrize("names", [FIRST, SECOND])
def test_the_samples_exist(names):
    assert not set(names) - set(ALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_types():
    from tests.models import table

    outcomes = table.compare_all(ALL)
    counts = comparing.counts(outcomes)
    assert not [table.line(outcome) for outcome in outcomes if outcome.differences]
    assert not [(o.model_type, row) for o in outcomes for row in o.rows if "failed:" in row[3]]
    least = LEAST[int(transformers.__version__.split(".")[0])]
    assert {op: counts.get(op, 0) for op in least if counts.get(op, 0) < least[op]} == {}


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_table_survives_what_happens_to_one_type(tmp_path):
    from tests.models import table

    text = table.document(table.compare_all(["llama", "gemma4_assistant", "no such type"]))
    assert "| llama | LlamaForCausalLM | fused loss, RMSNorm, add + norm, SwiGLU, rotary | same |" in text
    assert "not built: drafts" in text
    assert "no such type" in text
    assert "See also [models" in text
    assert sys.executable not in text
