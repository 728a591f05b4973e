"""Sizes that the proxies do not stand for: the problem's own rows, and programs that go round more than once."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import planted
import pytest
import torch

from liger_registry import registry
from liger_registry.config import Config, ConfigSpace, Fields
from liger_registry.device import Device
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.store import TableStore
from liger_registry.table import Choice
from liger_registry.tuning import whole
from liger_registry.tuning.arguments import Arguments
from liger_registry.tuning.tuner import tune
from liger_registry.tuning.verify import proxies_for, verify, walk_for

CPU = Device.parse("cpu")
LARGE = replace(CPU, units=132)
PLACE = torch.device("cpu")
FIRST_ROWS = planted.implementation(planted.first_rows)
SECOND_TILE = planted.implementation(planted.second_tile)
TALL = planted.problem(rows=2048, hidden=24)


def check(implementation, problem=TALL, op=planted.AFFINE, config=None, **options):
    arguments = Arguments.of(op, problem, PLACE)
    return whole.verify_whole(op, implementation, config or Config(), problem, CPU, arguments, **options)


@pytest.fixture(params=["every element", "a sample"])
def mode(request, monkeypatch):
    """Both ways to compare, every element in many chunks."""
    monkeypatch.setattr(whole, "_CPU_CHUNK", 24 * 100)
    monkeypatch.setattr(whole, "SLOW_S", 1e9 if request.param == "every element" else -1.0)
    return request.param


def altered(y, row):
    y[row] *= 1.05
    return (y,)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 512, 2048])
def test_right_ones_pass(rows):
    for implementation in (planted.PLAIN, planted.PLAIN_BACKWARD):
        found = check(implementation, planted.problem(rows=rows, hidden=24, phase=implementation.phase))
        assert found.passed, found.detail


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("rows", [512, 1023, 2047])
def test_rows_that_nobody_wrote_are_found(rows):
    found = check(planted.implementation(lambda *a, **k: planted.first_rows(*a, **k, rows=rows), "first"))
    assert not found.passed


@pytest.mark.parametrize("row", [0, 700, 1024, 2047])
def test_wrong_rows_are_found(mode, row):
    wrong = planted.implementation(lambda x, w, device, gain: altered(gain * x * w, row), "wrong")
    found = check(wrong)
    assert found.passed is (mode == "a sample" and row == 700)
    assert found.passed or "worst element" in found.detail


def test_a_gradient_that_sums_too_few_rows_is_found(mode):
    wrong = planted.implementation(planted.backward_first_rows, phase=BACKWARD)
    problem = planted.problem(rows=2048, hidden=24, phase=BACKWARD)
    assert verify(planted.AFFINE, wrong, Config(), problem, CPU, "cpu").passed, "the proxies have fewer rows"
    found = check(wrong, problem)
    assert found.passed is (mode == "a sample")
    assert found.passed or "grad_w" in found.detail


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, w, device, gain: ((gain * x * w)[:-1],), "shape (2047, 24), not that of 2048 rows"),
        (lambda x, w, device, gain: (gain * x * w, x), "2 of them, not 1"),
    ],
)
def test_results_of_other_shapes_are_named(wrong, says):
    assert says in check(planted.implementation(wrong, "wrong")).detail


def test_the_time_of_a_call_decides_how_much_is_compared(monkeypatch):
    seen = []
    monkeypatch.setattr(whole.Cut, "sample", lambda self: seen.append("sample") or [(0, self.rows)])
    assert check(planted.PLAIN).passed
    assert not seen
    monkeypatch.setattr(whole, "SLOW_S", -1.0)
    assert check(planted.PLAIN).passed
    assert seen == ["sample"]


def test_spans_cover_all_rows_and_samples_the_ends():
    cut = whole.Cut.of(planted.AFFINE, TALL)
    assert (cut.dim, cut.rows, cut.inputs, cut.width) == ("rows", 2048, (True, False), 24)
    spans = cut.spans(24 * 100)
    assert spans[0] == (0, 100)
    assert spans[-1] == (2000, 2048)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    sample = cut.sample()
    assert sample[0][0] == 0
    assert sample[-1][1] == 2048
    assert (992, 1056) in sample


def test_what_sums_over_its_rows_is_compared_at_once():
    mean = replace(
        planted.AFFINE,
        reference=lambda x, w, gain=1.0: (gain * x * w).mean(),
        schemes=(
            replace(
                planted.AFFINE.schemes[0],
                allocate=lambda x, w, gain=1.0: (x.new_empty(()),),
                reference=lambda x, w, gain=1.0: ((gain * x * w).mean(),),
            ),
        ),
        reduced={"y": ("rows", "hidden")},
        magnitude=lambda inputs, grads, options: {"y": (inputs[0] * inputs[1]).abs().mean()},
    )
    assert whole.Cut.of(mean, TALL) is None
    right = planted.implementation(lambda x, w, device, gain: ((gain * x * w).mean(),), "right")
    assert check(right, op=mean).passed
    wrong = planted.implementation(lambda x, w, device, gain: ((gain * x * w)[:512].mean(),), "wrong")
    assert not check(wrong, op=mean).passed


def test_references_are_shared_by_the_candidates_of_a_problem(monkeypatch):
    made = []
    real = whole._chunk
    monkeypatch.setattr(whole, "_chunk", lambda *a: made.append(a[-1]) or real(*a))
    monkeypatch.setattr(whole, "_CPU_CHUNK", 24 * 1024)
    references = whole.References()
    for _ in range(2):
        assert check(planted.PLAIN, references=references).passed
    assert made == [(0, 1024), (1024, 2048)]
    assert check(planted.PLAIN, planted.problem(rows=1024, hidden=24), references=references).passed
    assert made[2:] == [(0, 1024)]
    small = whole.References(max_bytes=0)
    for _ in range(2):
        assert check(planted.PLAIN, references=small).passed
    assert len(made) == 3 + 4


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("weight", ["bfloat16", "none"])
@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_rms_norm(phase, weight):
    op = registry.catalog.op("rms_norm")
    needs = {} if phase == FORWARD else {"needs": "x,weight" if weight != "none" else "x"}
    dtypes, flags = Fields(x="bfloat16", weight=weight), Fields(casting="llama", **needs)
    problem = Problem("rms_norm", "default", phase, Fields(rows=512, hidden=64), dtypes, flags)
    found = check(registry.catalog.find("rms_norm", "default", phase, "any:eager"), problem, op)
    assert found.passed, found.detail


# --- a tuning run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    planted.reset()
    return TableStore(tmp_path / "tables")


def test_a_plugin_that_fills_the_first_512_rows_is_not_chosen(store):
    problems = [TALL.having(rows=512), TALL, TALL.having(rows=1024)]
    catalog = planted.catalog(planted.PLAIN, FIRST_ROWS)
    assert verify(planted.AFFINE, FIRST_ROWS, Config(), TALL, CPU, "cpu").passed
    options = {"catalog": catalog, "device": CPU, "store": store, "isolate": False, "clock_source": "planted:clock"}
    rows = tune(problems, **options).rows
    assert [row.choice.implementation for row in rows] == ["any:first_rows", "any:plain", "any:plain"]
    for problem in problems[1:]:
        samples = {s.choice.implementation: s for s in store.load(CPU, "affine").samples_of(problem)}
        assert samples["any:first_rows"].status == "wrong"
        assert "whole" in samples["any:first_rows"].detail or "rows" in samples["any:first_rows"].detail
        assert samples["any:plain"].verified


def test_the_worker_takes_the_step_too(store):
    options = {"catalog_source": "planted:few_rows", "clock_source": "planted:clock"}
    (row,) = tune([TALL], catalog=planted.few_rows(), device=CPU, store=store, **options).rows
    assert row.choice == Choice("any:plain", Config())


# --- programs that go round -------------------------------------------------------------------------------------------


def test_a_program_that_is_wrong_in_its_second_tile_is_found():
    found = verify(planted.AFFINE, SECOND_TILE, Config(), planted.problem(), LARGE, "cpu")
    assert "on 2 units" in found.detail
    proxies = planted.AFFINE.proxies(planted.problem())
    assert verify(planted.AFFINE, SECOND_TILE, Config(), planted.problem(), LARGE, "cpu", proxies=proxies).passed
    for full in (False, True):
        assert not verify(planted.AFFINE, SECOND_TILE, Config(), planted.problem(), LARGE, "cpu", full=full).passed


@pytest.mark.parametrize("block_rows", [1, 16, 64])
@pytest.mark.parametrize("programs_per_unit", [1, 4, 16])
def test_rows_are_enough_for_two_rounds(programs_per_unit, block_rows):
    config = Config(programs_per_unit=programs_per_unit, block_rows=block_rows)
    space = ConfigSpace(programs_per_unit=[programs_per_unit], block_rows=[block_rows])
    item = replace(SECOND_TILE, space=space, heuristic=lambda p, d: config)
    problem = planted.problem(hidden=16)
    proxies = proxies_for(planted.AFFINE, item, config, problem, LARGE)
    walk = walk_for(planted.AFFINE, item, config, problem, LARGE, proxies)
    assert walk == {"rows": max(37, 4 * programs_per_unit * block_rows + 5)}
    assert "on 2 units" in verify(planted.AFFINE, item, config, problem, LARGE, "cpu").detail


def test_a_round_is_no_longer_than_is_legal():
    space = ConfigSpace(programs_per_unit=[16], block_rows=[64]).where(lambda c, p, d: p.rows <= 64, "too tall")
    config = Config(programs_per_unit=16, block_rows=64)
    item = replace(SECOND_TILE, space=space, heuristic=lambda p, d: config)
    assert walk_for(planted.AFFINE, item, config, TALL, LARGE, [{"rows": 37}, {"rows": 1}]) == {"rows": 37}
    assert walk_for(planted.AFFINE, item, config, TALL.having(hidden=1 << 20), LARGE, [{}]) is None
    assert walk_for(planted.AFFINE, item, config, TALL, LARGE, []) is None
