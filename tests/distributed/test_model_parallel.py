"""Models that are cut by weights, by the sequence and by layers: loss and every gradient equal to one rank's."""

from __future__ import annotations

import itertools

import pytest
from rank_models import FAMILIES, Model
from rank_training import Case

pytestmark = pytest.mark.dist


def cases(wrap, heads, layers=2):
    """Every family, head and world, plain and patched; those of the second tier are a diagonal of it."""
    found = []
    for number, (family, head, world, patched) in enumerate(itertools.product(FAMILIES, heads, (2, 4), (True, False))):
        case = Case(Model(family, head, layers), wrap, patched)
        first = (patched and (number // 2) % 3 == 0) or number == 1
        mark = pytest.mark.ci if first else pytest.mark.slow
        found.append(pytest.param(world, case, id=f"{world} ranks, {case}", marks=mark))
    return found


def hold(ranks, world, job, case):
    found = ranks(world).run(f"rank_model_parallel:{job}", case)
    for rank, one in enumerate(found):
        assert one.wrong == [], f"rank {rank} of {world}: {case}"
        assert one.materialised == {}, case
        if case.patched:
            assert "rms_norm" in one.applied
    return found


@pytest.mark.parametrize(("world", "case"), cases("tensor parallel", ("trainable", "tied", "frozen")))
def test_tensor_parallel(ranks, world, case):
    for found in hold(ranks, world, "tensor_parallel", case):
        # The head's classes are spread, and the loss is the vocabulary-parallel one.
        assert found.skipped == ""
        assert not case.patched or "fused_linear_cross_entropy" in found.applied


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tensor_parallel_in_evaluation(ranks, family):
    for found in ranks(2).run("rank_model_parallel:tensor_parallel_evaluation", Case(Model(family), "tensor parallel")):
        assert found["losses"] == pytest.approx([found["losses"][0]] * 3, rel=1e-6)
        assert found["predicted"]
        assert found["logits"] < 1e-5
        assert found["tokens"]
        assert found["materialised"] == {}, "a loss alone needs none"
        assert found["restored"]


@pytest.mark.parametrize(
    ("world", "patched"),
    [pytest.param(2, True, marks=pytest.mark.ci), pytest.param(4, True, marks=pytest.mark.ci)]
    + [pytest.param(world, False, marks=pytest.mark.slow) for world in (2, 4)],
)
def test_norms_between_tokens_that_are_spread(ranks, world, patched):
    hold(ranks, world, "sequence_parallel_norms", Case(Model(), "sequence parallel", patched))


@pytest.mark.parametrize(("world", "case"), cases("context parallel", ("trainable", "tied", "frozen", "lora")))
def test_context_parallel(ranks, world, case):
    hold(ranks, world, "context_parallel", case)


@pytest.mark.parametrize(("world", "case"), cases("pipeline", ("trainable", "frozen"), layers=4))
def test_pipeline(ranks, world, case):
    found = hold(ranks, world, "pipeline", case)
    if case.patched:
        heads = ["fused_linear_cross_entropy" in one.applied for one in found]
        assert heads == [False] * (world - 1) + [True]
