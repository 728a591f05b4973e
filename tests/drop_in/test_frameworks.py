"""What training frameworks import from liger_kernel, read off their releases, executed one by one under ``exec``."""

from __future__ import annotations

import json
import textwrap

import pytest
from under_exec import python

APPLY = "from liger_kernel.transformers import apply_liger_kernel_to_"
LLAMA_FACTORY = (
    "gemma gemma2 gemma3 gemma3_text glm4 glm4v gpt_oss granite llama llava mistral mixtral mllama olmo2 paligemma "
    "phi3 qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_5 qwen3_moe qwen3_next"
)
MS_SWIFT = "gemma3 gemma3_text glm4 glm4v glm4v_moe internvl llama4 llava paligemma qwen3_moe qwen3_next"
#: Axolotl 0.19.0, LLaMA-Factory 0.9.5, ms-swift 4.6.0, oumi 0.9, transformers 5.24.0; a statement of several once.
IMPORTS = {
    "axolotl": [
        "from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase",
        "import liger_kernel.ops.fused_linear_cross_entropy",
        "from liger_kernel.ops.backends.registry import IMPL_REGISTRY",
        "from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as _fused_selective_log_softmax",
        "from liger_kernel.ops.utils import calculate_settings, compare_version, torch_to_triton_dtype",
        "from liger_kernel.ops.utils import calculate_settings, compare_version, ensure_contiguous, "
        "torch_to_triton_dtype",
        f"{APPLY}granite",
        "from liger_kernel.transformers import functional",
        "from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss",
        "from liger_kernel.transformers.functional import liger_cross_entropy",
        "from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss",
        "from liger_kernel.transformers.geglu import LigerGEGLUMLP",
        "from liger_kernel.transformers.layer_norm import LigerLayerNorm",
        "from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss",
        "from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN",
        "from liger_kernel.transformers.rms_norm import LigerRMSNorm",
        "from liger_kernel.transformers.rms_norm import LigerRMSNormForGemma2, LigerRMSNormForGemma4",
        "from liger_kernel.transformers.rope import liger_rotary_pos_emb",
        "from liger_kernel.transformers.swiglu import LigerSwiGLUMLP",
        "from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection",
        "from liger_kernel.utils import PEFT_AVAILABLE",
        "from liger_kernel.utils import is_npu_available",
    ],
    "llamafactory": [
        "import liger_kernel",
        "import liger_kernel.transformers as liger_transformers",
        *(f"{APPLY}{name} as apply_liger_kernel" for name in LLAMA_FACTORY.split()),
    ],
    "ms-swift": [
        "from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss",
        "from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss",
        "from liger_kernel.transformers.model import loss_utils",
        "from liger_kernel.transformers import (apply_liger_kernel_to_gemma, apply_liger_kernel_to_llama, "
        "apply_liger_kernel_to_mistral, apply_liger_kernel_to_mixtral, apply_liger_kernel_to_mllama, "
        "apply_liger_kernel_to_phi3, apply_liger_kernel_to_qwen2, apply_liger_kernel_to_qwen2_5_vl, "
        "apply_liger_kernel_to_qwen2_vl, apply_liger_kernel_to_qwen3)",
        *(f"{APPLY}{name}" for name in MS_SWIFT.split()),
    ],
    "oumi": ["import liger_kernel.transformers"],
    "transformers": ["from liger_kernel.transformers import _apply_liger_kernel_to_instance"],
}
EACH = """
    import json, warnings
    warnings.simplefilter("error")
    for framework, statements in json.loads({imports!r}).items():
        for statement in statements:
            names = {{}}
            try:
                exec(statement, names)
            except Exception as error:
                raise AssertionError(f"{{framework}}: {{statement}}") from error
    print("all")
"""


@pytest.mark.ci
def test_every_import_of_frameworks():
    statements = [statement for listed in IMPORTS.values() for statement in listed]
    assert len(statements) == 64
    assert python(EACH.format(imports=json.dumps(IMPORTS))).split() == ["all"]


USES = """
    import importlib.metadata, importlib.util, inspect, operator, sys, types, warnings
    from packaging import version
    from packaging.specifiers import SpecifierSet
    import torch

    # LLaMA-Factory, ms-swift and oumi ask whether it is there, and which release it is.
    assert importlib.util.find_spec("liger_kernel") is not None
    assert version.parse(importlib.metadata.version("liger-kernel")) >= version.parse("0.7.0")
    assert importlib.metadata.version("liger-kernel") in SpecifierSet("==0.8.5")

    # LLaMA-Factory reads keywords off a function's signature, Axolotl too, and hands on settings that are None.
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    for function in MODEL_TYPE_TO_APPLY_LIGER_FN.values():
        assert "model" in inspect.signature(function).parameters
    keywords = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN["llama"]).parameters
    assert {"rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu"} <= set(keywords)

    # Axolotl keeps torch.compile out of the fused loss by putting wrappers in place of its two halves.
    import liger_kernel.ops.fused_linear_cross_entropy as module
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target = torch.tensor([1, 2, -100, 3, 10])
    loss, z_loss, accuracy, predicted, *grads = module.fused_linear_cross_entropy_forward(hidden, weight, target)
    right = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(loss, right.detach())
    assert (z_loss, accuracy, predicted, grads[2]) == (None, None, None, None)
    scaled = module.fused_linear_cross_entropy_backward(torch.tensor(2.0), *grads)
    torch.testing.assert_close(scaled[:2], tuple(2 * g for g in torch.autograd.grad(right, (hidden, weight))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.fused_linear_cross_entropy_forward = torch.compiler.disable(module.fused_linear_cross_entropy_forward)
    assert ["is replaced" in str(warning.message) for warning in caught] == [True]

    # Its trainer takes log-probabilities of completions from logits.
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax
    logits, ids = torch.randn(2, 5, 13), torch.randint(13, (2, 7))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0]])
    logps = fused_selective_log_softmax(logits, ids, 0.7)
    right = (logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, -4:, None])[..., 0]
    torch.testing.assert_close(logps, right)
    torch.testing.assert_close(fused_selective_log_softmax(logits, ids, 0.7, mask), right * mask[:, -4:])

    # Its own device code asks for blocks and dtypes.
    from liger_kernel.ops.utils import calculate_settings, compare_version, ensure_contiguous, torch_to_triton_dtype
    assert [calculate_settings(n) for n in (1, 1000, 2048, 8193, 65536)] == [
        (1, 4), (1024, 4), (2048, 8), (16384, 16), (65536, 32)
    ]
    assert compare_version("torch", operator.ge, "2.0.0") and not compare_version("torch", operator.lt, "2.0.0")
    assert not compare_version("no_such_package", operator.ge, "0")
    assert str(torch_to_triton_dtype[torch.bfloat16]) == "bf16"
    seen = ensure_contiguous(lambda ctx, x, *, y: (ctx, x.is_contiguous(), y.is_contiguous()))
    assert seen("ctx", torch.ones(2, 3).T, y=torch.ones(2, 3).T) == ("ctx", True, True)

    # ms-swift puts a function in place of the loss of causal models: it is told that models do not call it.
    from liger_kernel.transformers.model import loss_utils
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_utils.LigerForCausalLMLoss = lambda *args, **kwargs: None
    assert "layers and losses of models" in str(caught[0].message)
    print("all")
"""


@pytest.mark.ci
def test_what_frameworks_do_with_them():
    assert python(textwrap.dedent(USES)).split() == ["all"]
