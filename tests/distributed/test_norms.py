"""Norms over DTensors: each rank its own rows, and results and gradients of the whole."""

from __future__ import annotations

import pytest
from rank_norms import INPUTS, LAYOUTS

pytestmark = [pytest.mark.dist, pytest.mark.ci]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("op", INPUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients(ranks, world, op, layout):
    for found in ranks(world).run("rank_norms:norm", op, layout):
        assert found["off"] < 1e-6
        gathered = layout == "replicated" or ("hidden" in layout and op != "swiglu")
        assert ("Replicate" in found["placements"]) == gathered, found
        if op != "swiglu":
            assert "Shard" not in found["weight"]


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_a_sum(ranks, world):
    assert max(ranks(world).run("rank_norms:sum_of_parts")) < 1e-6


def test_what_is_refused(ranks):
    for found in ranks(2).run("rank_norms:refused"):
        assert "InvalidInputError" in found["plain"]
        assert "distribute_tensor" in found["plain"]
        assert "UnsupportedShardingError: cross_entropy takes no DTensors" in found["loss"]
        assert "vocabulary_parallel_cross_entropy" in found["loss"]


def test_tokens_of_ones_own_exchange_the_weights_gradient_alone(ranks):
    for found in ranks(2).run("rank_norms:collectives"):
        assert [(name.split(".")[-1], count) for name, count in found.items()] == [("all_reduce", 1)]
