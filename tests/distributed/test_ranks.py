"""The harness: what a rank returns, and that one that fails is told of, stops the others and leaves no process."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.ci]


def test_what_ranks_return_and_what_is_told_of_one_that_fails():
    with Ranks(2, limit_s=90) as ranks:
        assert ranks.run("rank_failures:fine", "word") == [("word", 0, 2, 1.0), ("word", 1, 2, 1.0)]
        for job, told in (
            ("raises", r"rank 1: Traceback(.|\n)*ValueError: planted"),
            ("dies", "rank 1: its process ended with 7"),
        ):
            started = ranks.run("rank_failures:process")
            before = time.monotonic()
            with pytest.raises(AssertionError, match=told):
                ranks.run(f"rank_failures:{job}")
            assert time.monotonic() - before < 20
            assert not any(psutil.pid_exists(pid) for pid in started)
        assert ranks.run("rank_failures:fine", "again")[1][0] == "again"
        started = ranks.run("rank_failures:process")
        with pytest.raises(AssertionError, match=r"rank 1: it was still waiting(.|\n)*rank_failures.py"):
            ranks.run("rank_failures:hangs", limit_s=2)
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert os.getpid() not in started
