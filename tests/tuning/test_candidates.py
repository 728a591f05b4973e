from __future__ import annotations

from dataclasses import replace

import planted
import pytest

from liger_registry.config import Config, ConfigSpace
from liger_registry.device import Device
from liger_registry.implementation import Capability
from liger_registry.tuning.candidates import MOST, candidates, cap, in_order
from liger_registry.tuning.verify import proxies_for

CPU, H200 = Device.parse("cpu"), Device.parse("h200")


def texts(found):
    return [str(c) for c in found.legal]


def test_all_legal_configs_heuristic_first():
    found = candidates(planted.sized(), planted.problem(), CPU)
    assert texts(found) == ["any:plain()", "any:blocks(block=32)", "any:blocks(block=64)", "any:blocks(block=128)"]
    assert [c.heuristic for c in found.legal] == [True, True, False, False]
    assert str(found.default) == "any:plain()"


def test_reasons_for_what_is_not_legal():
    gpu = replace(planted.PLAIN, name="gpu", capability=Capability(vendor="cuda"))
    narrow = replace(
        planted.BLOCKED, name="narrow", space=planted.BLOCKS.where(lambda c, p, d: c.block <= 64, "too wide")
    )
    hungry = replace(planted.BLOCKED, name="hungry", extra_bytes=lambda p, c: c.block * 1000)
    catalog = planted.catalog(gpu, narrow, hungry)
    problem = planted.problem()
    found = candidates(catalog, replace(problem, flags=problem.flags.having(budget=65536)), CPU)
    assert texts(found) == [
        "any:narrow(block=32)", "any:narrow(block=64)", "any:hungry(block=32)", "any:hungry(block=64)",
    ]  # fmt: skip
    reasons = {r.choice: r.reason for r in found.rejected}
    assert reasons["cuda:gpu"] == "it is for cuda, the device is cpu"
    assert "128,000 bytes" in reasons["any:hungry(block=128)"]
    assert len(candidates(catalog, problem, CPU, budget=40_000).legal) == 3


def test_a_heuristic_that_is_illegal_here_is_no_default():
    bad = replace(planted.BLOCKED, name="bad", space=planted.BLOCKS.where(lambda c, p, d: c.block > 32, "too narrow"))
    found = candidates(planted.catalog(bad, planted.BLOCKED), planted.problem(), CPU)
    assert str(found.default) == "any:blocks(block=32)"
    assert ("any:bad(block=32)", "too narrow") in [(r.choice, r.reason) for r in found.rejected]


def test_threads_beyond_the_device():
    space = ConfigSpace(num_warps=[4, 32, 64])
    warps = replace(planted.PLAIN, name="warps", space=space, heuristic=lambda p, d: Config(num_warps=4))
    found = candidates(planted.catalog(warps), planted.problem(), H200)
    assert texts(found) == ["any:warps(num_warps=4)", "any:warps(num_warps=32)"]


def test_order_is_own_first_then_the_contracts():
    catalog = planted.catalog(planted.BLOCKED, planted.PLAIN)
    assert [i.name for i in in_order(catalog, planted.problem())] == ["plain", "blocks"]
    with catalog.stage("liger-registry") as staging:
        staging.register(replace(planted.PLAIN, name="ours"))
    assert [i.name for i in in_order(catalog, planted.problem())] == ["ours", "plain", "blocks"]


def test_the_cap_keeps_the_heuristic_and_a_spread_of_the_rest():
    space = ConfigSpace(a=list(range(10)), b=list(range(10)), c=list(range(8)))
    heuristic = Config(a=9, b=9, c=7)
    configs = list(space.configs(planted.problem(), CPU))
    kept = cap(configs, heuristic)
    assert len(kept) == MOST == len(set(kept))
    assert kept[0] == heuristic
    assert kept == cap(configs, heuristic), "the same in every process"
    for name, values in space.parameters.items():
        assert {c[name] for c in kept} == set(values)
    assert cap(configs[:5], configs[2]) == [configs[2], configs[0], configs[1], configs[3], configs[4]]


def test_what_the_cap_leaves_out_says_so():
    wide = replace(
        planted.PLAIN, name="wide", space=ConfigSpace(cost=list(range(1, 101))), heuristic=lambda p, d: Config(cost=50)
    )
    found = candidates(planted.catalog(wide), planted.problem(), CPU)
    assert len(found.legal) == MOST
    assert len(found.rejected) == 100 - MOST
    assert "more than 64" in found.rejected[0].reason


def planted_fault(*arguments):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("fields", "choice", "reason"),
    [
        ({"heuristic": planted_fault}, "any:bad", "its heuristic raised ZeroDivisionError: planted"),
        ({"heuristic": lambda p, d: None}, "any:bad", "its heuristic gave None, which is no Config"),
        ({"heuristic": lambda p, d: {"block": 32}}, "any:bad", "its heuristic gave {'block': 32}"),
        ({"heuristic": lambda p, d: Config(rows=1)}, "any:bad(rows=1)", "it has (rows), the space has (block)"),
        ({"space": planted.BLOCKS.where(planted_fault)}, "any:bad(block=128)", "its space raised ZeroDivisionError"),
        ({"extra_bytes": planted_fault}, "any:bad(block=64)", "its extra_bytes raised ZeroDivisionError: planted"),
    ],
)
def test_a_plugin_whose_own_functions_fail_stops_nobody(fields, choice, reason):
    catalog = planted.catalog(replace(planted.BLOCKED, name="bad", **fields), planted.PLAIN)
    found = candidates(catalog, planted.problem(), CPU, budget=10**6)
    assert str(found.default) == "any:plain()"
    assert any(r.choice == choice and reason in r.reason for r in found.rejected)


def test_configs_about_which_a_plugins_space_raises_are_rejected_one_by_one():
    space = planted.BLOCKS.where(lambda c, p, d: c.block != 64 or planted_fault())
    found = candidates(planted.catalog(replace(planted.BLOCKED, space=space)), planted.problem(), CPU)
    assert texts(found) == ["any:blocks(block=32)", "any:blocks(block=128)"]
    assert [(r.choice, r.reason) for r in found.rejected] == [
        ("any:blocks(block=64)", "its space raised ZeroDivisionError: planted")
    ]


def test_a_space_that_raises_at_a_proxys_size_does_not_stop_verification():
    space = planted.BLOCKS.where(lambda c, p, d: p.rows >= 64 or planted_fault())
    (item,) = planted.catalog(replace(planted.BLOCKED, space=space)).implementations("affine")
    found = proxies_for(planted.AFFINE, item, Config(block=32), planted.problem(rows=1024), CPU)
    assert found
    assert min(dims["rows"] for dims in found) >= 64
