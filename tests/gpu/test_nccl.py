"""One rank over NCCL: what the ranks over gloo show on the CPU holds with GPU tensors and NCCL's collectives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if not torch.distributed.is_nccl_available():
    pytest.skip("needs NCCL", allow_module_level=True)

from ranks import Ranks


@pytest.fixture(scope="module")
def one_rank():
    with Ranks(1, limit_s=85.0, backend="nccl", NCCL_NVLS_ENABLE="0") as ranks:
        yield ranks


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_step_is_the_plain_models(one_rank, family, wrap):
    (found,) = one_rank.run("rank_nccl:training", family, wrap)
    assert found["loss"] <= 1, found
    assert found["gradients"] <= 1, found
    assert found["materialised"] == {}
    assert {"fused_linear_cross_entropy", "rms_norm"} <= found["ops"] | {
        op.replace("fused_add_", "") for op in found["ops"]
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_a_head_with_its_classes_over_the_group(one_rank, dtype):
    (found,) = one_rank.run("rank_nccl:head", dtype)
    assert max(found.values()) <= 1, found


def test_norms_over_dtensors(one_rank):
    (found,) = one_rank.run("rank_nccl:norm")
    assert found <= 1e-6


def test_a_sharded_warmup_and_a_frozen_plan(one_rank, tmp_path):
    (found,) = one_rank.run("rank_nccl:warm", str(tmp_path))
    assert found["measured"][0] > 0
    assert found["measured"][1] == 0
    assert found["sources"] == ["exact", "exact"]
    assert found["decisions"] >= 1
    assert len(found["digest"]) >= 8
