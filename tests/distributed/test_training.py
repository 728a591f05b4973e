"""Loss and every gradient on two and four ranks equal to one rank's, however the model is distributed."""

from __future__ import annotations

import itertools

import pytest
from rank_models import FAMILIES, Model
from rank_training import Case

pytestmark = pytest.mark.dist

HEADS = ("trainable", "tied", "frozen", "lora")


def hold(ranks, world, job, case):
    for rank, found in enumerate(ranks(world).run(f"rank_training:{job}", case)):
        assert found.wrong == [], f"rank {rank} of {world}: {case}"
        assert found.materialised == {}, case
        if case.patched:
            assert "rms_norm" in found.applied
            fused = "fused_linear_cross_entropy" in found.applied
            # What LoRA adds to a head's logits is no product of one matrix; the report says so.
            assert fused == (case.model.head != "lora"), found.skipped
            assert fused or "an adapter's" in found.skipped


def sample(first, second, *, others=True):
    """A grid of two worlds, of which a few cases are in the earlier tiers."""
    return [
        *[pytest.param(*case, id=f"{case[0]} ranks, {case[1]}", marks=pytest.mark.ci) for case in first],
        *[
            pytest.param(*case, id=f"{case[0]} ranks, {case[1]}", marks=pytest.mark.slow)
            for case in second
            if case not in first
        ],
    ]


def grid(wraps, **options):
    return [
        (world, Case(Model(family, head), wrap, patched, **options))
        for world, wrap, family, head, patched in itertools.product((2, 4), wraps, FAMILIES, HEADS, (True, False))
    ]


def spread(wraps, **options):
    """Each family, each head and each way, but not all together; on two ranks and on four."""
    return [
        (2 if n % 2 else 4, Case(Model(family, HEADS[(n + k) % 4]), wrap, True, **options))
        for k, wrap in enumerate(wraps)
        for n, family in enumerate(FAMILIES)
    ]


DATA = ("ddp", "fsdp1", "fsdp2")


@pytest.mark.parametrize(("world", "case"), sample([*spread(DATA), (2, Case(Model(), "ddp", False))], grid(DATA)))
def test_data_parallel(ranks, world, case):
    hold(ranks, world, "data_parallel", case)


VARIANTS = ("fsdp2 bf16", "fsdp2 offload", "fsdp2 head", "fsdp2 late")  # applied to after it was sharded


def variants(patched):
    return [
        (world, Case(Model(family), wrap, patched))
        for world, wrap, family in itertools.product((2, 4), VARIANTS, FAMILIES)
    ]


@pytest.mark.parametrize(
    ("world", "case"), sample([*variants(True)[::5], *variants(True)[12:14]], [*variants(True), *variants(False)])
)
def test_mixed_precision_offload_a_head_by_itself_and_applying_late(ranks, world, case):
    hold(ranks, world, "data_parallel", case)


def steps(patched):
    return [
        (2, Case(Model(family, head), wrap, patched, micro, checkpointing))
        for family, head, wrap, (micro, checkpointing) in itertools.product(
            FAMILIES, ("trainable", "tied", "lora"), DATA, ((2, False), (1, True), (2, True))
        )
    ]


@pytest.mark.parametrize(("world", "case"), sample(steps(True)[::10], [*steps(True), *steps(False)[::2]]))
def test_accumulation_and_checkpointing(ranks, world, case):
    hold(ranks, world, "data_parallel", case)


ZERO = ("zero2", "zero3")


@pytest.mark.parametrize(
    ("world", "case"),
    sample([*spread(ZERO), (2, Case(Model(), "zero3", False))], [*grid(ZERO), *grid(("zero3",), micro=2)]),
)
def test_deepspeed(ranks, world, case):
    pytest.importorskip("deepspeed")
    hold(ranks, world, "zero", case)
