"""Many ranks: one plan whatever their tables are, each measurement once, and nobody waits for one that is gone."""

from __future__ import annotations

import pytest
from rank_plans import PROBLEMS
from ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.ci]


def plans(ranks, root, tables):
    return ranks(len(tables)).run("rank_plans:freeze", str(root), tables)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_other_tables_with_none_and_with_a_corrupt_one(ranks, tmp_path, world):
    tables = ["eager", "functional", "none", "corrupt"]
    found = plans(ranks, tmp_path / "one", tables[:world])
    assert len({one["digest"] for one in found}) == 1
    assert all(one == found[0] for one in found)
    assert found[0]["decisions"] >= 2
    assert found[0]["sources"] == ["plan"]
    assert {"4 any:eager()", "16 any:eager()", "32 any:eager()"} <= set(found[0]["choices"])
    # The same again is the same plan; another first table is another.
    again = plans(ranks, tmp_path / "again", tables[:world])
    other = plans(ranks, tmp_path / "other", ["functional", *tables[1:world]])
    assert again[0]["digest"] == found[0]["digest"]
    assert len({one["digest"] for one in other}) == 1
    assert other[0]["digest"] != found[0]["digest"]


@pytest.mark.parametrize("tables", [["none", "eager"], ["corrupt", "eager"], ["corrupt", "none"]], ids="-".join)
def test_the_rank_that_decides_has_no_table_or_a_corrupt_one(ranks, tmp_path, tables):
    found = plans(ranks, tmp_path, tables)
    assert found[0] == found[1]
    # What the shipped tables know of this device is in every plan; so is what the other rank's table asks.
    assert found[0]["decisions"] >= ("eager" in tables)
    assert len(found[0]["digest"]) == 64


def test_two_kinds_of_devices(ranks, tmp_path):
    found = ranks(4).run("rank_plans:freeze_on_two_kinds", str(tmp_path))
    assert len({one["digest"] for one in found}) == 1
    assert len(found[0]["devices"]) == 2
    for rank, one in enumerate(found):
        choice = "any:functional" if rank % 2 else "any:eager"
        assert f"4 {choice}()" in one["choices"], one["choices"]


def test_a_rank_that_dies_leaves_no_other_freezing(tmp_path):
    with Ranks(4, collective_s=10) as ranks:  # how long gloo waits for a rank that is gone
        outcomes = ranks.outcomes("rank_plans:freeze_while_one_dies", str(tmp_path), limit_s=80)
    assert "ended with -9" in outcomes[3].error
    for outcome in outcomes[:3]:
        assert outcome.error == ""
        assert "one of them has died or did not call freeze()" in outcome.value["error"]
        assert outcome.value["seconds"] < 40


# -- warmup ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_each_measurement_once_and_a_share_of_them_on_each_rank(ranks, tmp_path, world):
    found = ranks(world).run("rank_plans:warm", str(tmp_path))
    asked = [text for one in found for text in one["problems"]]
    assert len(asked) == len(set(asked)) == len(PROBLEMS)
    counts = [one["measured"] for one in found]
    assert len(set(counts)) == 1, "problems of one kind, equally many on each rank"
    for one in found:
        assert one["decisions"] == len(PROBLEMS)
        assert one["samples"] == sum(counts), "measured once, and in every directory"
        assert one["measured"] == one["samples"] / world
        assert one["again"] == 0, "a restart measures nothing that is there"


def test_a_rank_that_dies_strands_nobody_and_a_restart_does_the_rest(tmp_path):
    with Ranks(4, limit_s=90) as ranks:
        outcomes = ranks.outcomes("rank_plans:warm_while_one_dies", str(tmp_path), True, 3.0, limit_s=60)
        assert "ended with -9" in outcomes[1].error
        for outcome in (outcomes[0], *outcomes[2:]):
            assert outcome.error == ""
            assert "rank 1 stopped during warmup" in outcome.value["error"]
            assert "run warmup again" in outcome.value["error"]
            assert outcome.value["seconds"] < 30
        after = ranks.run("rank_plans:warm", str(tmp_path))
    # Three of four shares were on the disks of those who measured them.
    assert [one["measured"] > 0 for one in after] == [False, True, False, False]
    assert all(one["decisions"] == len(PROBLEMS) for one in after)


def test_a_rank_that_takes_long_is_waited_for(ranks, tmp_path):
    silent_s = 1.0
    found = ranks(2).run("rank_plans:warm_while_one_dies", str(tmp_path), False, silent_s)
    assert [one["error"] for one in found] == ["", ""]
    assert all(one["seconds"] > 2 * silent_s for one in found)


# -- collectives -------------------------------------------------------------------------------------------------------


def test_there_are_collectives_in_freezing_and_none_in_dispatch_or_timing(ranks, tmp_path):
    for found in ranks(2).run("rank_plans:collectives", str(tmp_path)):
        assert found["dispatch"] == found["timing"] == found["after"] == {}
        # The counts are of both, since PyTorch's exchange of objects is made of exchanges of tensors.
        assert found["freeze"]["all_gather_object"] == 3
        # Who is there, and what they found; none of them while anything is measured.
        assert found["warmup"]["all_gather_object"] == 2
        assert found["warmup"]["new_group"] == 1
