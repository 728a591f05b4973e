"""Models with the operations' kernels in them, on a GPU: the same numbers, the same tokens and the same curves."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import comparing
import training

pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = [
    "cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite",
    "llama", "mistral", "mixtral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
]  # fmt: skip
# Kernels and cuBLAS sum in other orders than each other; on the CPU both sides share PyTorch's.
SLACK = 20.0
STEPS = 300
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
TIMES = 4.0
LEAST = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
END = {torch.float32: 5e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("model_type", TYPES)
def test_is_the_same_patched(model_type):
    outcome = comparing.compare(model_type, device="cuda", slack=SLACK)
    if outcome.unbuilt:
        pytest.skip(outcome.unbuilt)  # the machine's transformers may be older
    assert "loss" not in outcome.plain, outcome.plain
    assert not outcome.differences, (outcome.differences, outcome.rows)
    assert "fused_linear_cross_entropy" in outcome.ops


@pytest.mark.parametrize("name", training.MODELS)
@both_dtypes
def test_the_curves_are_the_same(name, dtype):
    plain, patched, nudged = (
        training.curve(name, STEPS, dtype=dtype, device="cuda", **how)
        for how in ({}, {"patched": True}, {"nudged": True})
    )
    assert plain[-1] < 0.6 * plain[0]
    noise = max(*training.apart(nudged, plain), LEAST[dtype])
    assert max(training.apart(patched, plain)) < TIMES * noise
    end, ours, theirs = (training.mean_of_last(losses, 50) for losses in (plain, patched, nudged))
    assert abs(ours - end) < max(END[dtype] * end, TIMES * abs(theirs - end))
