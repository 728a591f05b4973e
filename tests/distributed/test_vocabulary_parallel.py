"""Heads whose classes are spread over ranks: losses and gradients of the whole head, without its logits."""

from __future__ import annotations

import math

import pytest
import torch

from liger_registry.errors import InvalidInputError, UnsupportedOptionError
from liger_registry.transformers import vocabulary_parallel_cross_entropy

pytestmark = [pytest.mark.dist, pytest.mark.ci]

OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "capped and scaled": {"softcap": 5.0, "scale": 0.7},
    "weighted": {"weighted": True},
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("vocab", [41, 5])  # spread unevenly; and one of four ranks without a class
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients(ranks, world, vocab, name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for found in ranks(world).run("rank_heads:against_float64", vocab, dtype, dict(OPTIONS[name])):
            assert all(share <= 1.0 for share in found.values()), (dtype, found)


@pytest.mark.parametrize("world", [2, 4])
def test_edges(ranks, world):
    for found in ranks(world).run("rank_heads:edges"):
        assert found["nothing"] == (0.0, 0.0, 0.0)
        assert [n for n, wrong in enumerate(found["nobody's"]) if wrong] == [5]
        others = 39 * math.exp(-20.0)
        assert found["sure"] == pytest.approx(-math.log1p(others), rel=1e-4)
        # Not even this rank's own logits all at once are more than this.
        assert found["elements"] <= 1 / world


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("read", ["loss", "logits"])
@pytest.mark.parametrize("layout", ["gathered", "kept", "spread"])
def test_a_bound_head_under_colwise_parallel(ranks, world, layout, read):
    for found in ranks(world).run("rank_heads:colwise", layout, read):
        assert found["off"] < 1e-5
        if read == "loss" and layout != "spread":
            assert found["counts"] == 0
        else:  # a reader that needs the real ones is counted with its line
            assert found["counts"] == 1
            assert "rank_heads.py" in found["places"][0]


def test_a_bound_head_under_fsdp_and_colwise_parallel(ranks):
    for found in ranks(4).run("rank_heads:fsdp_and_colwise"):
        assert found["off"] < 1e-5
        assert found["counts"] == {}


def test_what_is_refused():
    hidden, weight, target = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(UnsupportedOptionError, match="label_smoothing"):
        vocabulary_parallel_cross_entropy(hidden, weight, target, vocab_start=0, label_smoothing=0.1)
    with pytest.raises(UnsupportedOptionError, match="reduction"):
        vocabulary_parallel_cross_entropy(hidden, weight, target, vocab_start=0, reduction="median")
    with pytest.raises(InvalidInputError, match="does not fit"):
        vocabulary_parallel_cross_entropy(hidden, weight[:, :3], target, vocab_start=0)
    with pytest.raises(InvalidInputError, match="target has shape"):
        vocabulary_parallel_cross_entropy(hidden, weight, target[:2], vocab_start=0)
    with pytest.raises(InvalidInputError, match="vocab_start"):
        vocabulary_parallel_cross_entropy(hidden, weight, target, vocab_start=-1)
