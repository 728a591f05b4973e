"""What overrides the tables: pins, a plan and the modes; and what a miss does in each of them."""

from __future__ import annotations

import dataclasses
import threading

import fakes
import pytest

from liger_registry import Config
from liger_registry.config import Fields
from liger_registry.decision import CLUSTER, HITS, SHIPPED_TABLES, TIERS, USER, Terms, differences
from liger_registry.errors import NoImplementationError, StrictMissError, UnknownImplementationError
from liger_registry.plan import Plan
from liger_registry.problem import BACKWARD, SCHEME
from liger_registry.table import PARTLY, Choice

H200, H100 = fakes.H200, fakes.H100
PROBLEM = fakes.problem(rows=1024)


def ask(dispatcher, problem=PROBLEM, device=H200, **terms):
    trace = []
    decision = dispatcher.decide(problem, device, Terms(**terms), trace)
    return decision, trace


def answer(dispatcher, problem=PROBLEM, device=H200, **terms):
    decision, _ = ask(dispatcher, problem, device, **terms)
    return decision.implementation.id, decision.config.text, decision.source


def record(store, device=H200, problem=PROBLEM, **entry):
    store.record(device, "affine", [fakes.stored(problem, **entry)])


# --- pins -------------------------------------------------------------------------------------------------------------


def test_a_pin_wins_over_everything(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], block=64)
    assert answer(dispatcher, pins=(("affine", "plain", None),)) == ("any:plain", "", "pinned")
    assert answer(dispatcher, pins=(("affine/backward", "plain", None),)) == ("cuda:tiled", "block=64", "exact")
    assert answer(dispatcher, pins=(("other", "plain", None),)) == ("cuda:tiled", "block=64", "exact")
    assert answer(dispatcher, pins=(("affine", "cuda:tiled", Config(block=128)),)) == (
        "cuda:tiled",
        "block=128",
        "pinned",
    )
    # Of several the first counts.
    pins = (("affine", "tiled", None), ("affine", "plain", None))
    assert answer(dispatcher, pins=pins)[0] == "cuda:tiled"
    assert answer(dispatcher, pins=pins[::-1])[0] == "any:plain"


def test_a_bare_name_means_the_devices_vendor(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path)
    pins = (("affine", "tiled", None),)
    assert answer(dispatcher, pins=pins)[0] == "cuda:tiled"
    assert answer(dispatcher, device=fakes.MI300X, pins=pins)[0] == "rocm:tiled"


def test_a_pin_takes_the_fastest_measured_config_that_is_legal(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    pins = (("affine", "tiled", None),)
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=32", "pinned")
    samples = [fakes.sample(PROBLEM, block=b, time_us=t) for b, t in {16: 1.0, 32: 9.0, 64: 6.0, 128: 5.0}.items()]
    stores[USER].record(H200, "affine", samples=[*samples, fakes.sample(PROBLEM, block=64, status="wrong", time_us=1)])
    stores[CLUSTER].record(H200, "affine", samples=[fakes.sample(PROBLEM, block=64, time_us=7.0)])
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=128", "pinned")
    partly = dataclasses.replace(fakes.sample(PROBLEM, block=32, time_us=2.0), detail=PARTLY)
    stores[USER].record(H200, "affine", samples=[partly])
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=128", "pinned"), "what is not verified in full"
    assert answer(dispatcher, pins=pins, budget=6400) == ("cuda:tiled", "block=64", "pinned")
    dispatcher.mode = "off"
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=32", "pinned")


def test_pins_that_cannot_be_kept(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path)
    with pytest.raises(UnknownImplementationError, match="no implementation 'tyled'"):
        ask(dispatcher, pins=(("affine", "tyled", None),))
    with pytest.raises(NoImplementationError, match="it is for cuda, the device is cpu"):
        ask(dispatcher, device=fakes.CPU, pins=(("affine", "cuda:tiled", None),))
    with pytest.raises(NoImplementationError, match="block is wider"):
        ask(dispatcher, fakes.problem(hidden=64), pins=(("affine", "cuda:tiled", Config(block=128)),))
    with pytest.raises(NoImplementationError, match="not declared"):
        ask(dispatcher, pins=(("affine", "cuda:tiled", Config(block=7)),))
    with pytest.raises(NoImplementationError, match="the budget is 10"):
        ask(dispatcher, pins=(("affine", "cuda:tiled", None),), budget=10)


def test_a_pin_without_a_phase_is_a_wish_for_backward(tmp_path):
    own = [fakes.tiled(), fakes.tiled(BACKWARD, space=fakes.SPACE.where(lambda c, p, d: False, "never")),
           fakes.implementation("plain", BACKWARD), fakes.implementation("solo")]  # fmt: skip
    dispatcher, _ = fakes.dispatcher(tmp_path, cat=fakes.catalog(own=own))
    back = fakes.problem(phase=BACKWARD)
    assert answer(dispatcher, back, pins=(("affine", "tiled", None),)) == ("any:plain", "", "heuristic")
    with pytest.raises(NoImplementationError, match="never"):
        ask(dispatcher, back, pins=(("affine/backward", "tiled", None),))
    assert answer(dispatcher, back, pins=(("affine", "solo", None),)) == ("any:plain", "", "heuristic")
    # The next pin counts where the wish cannot be kept.
    pins = (("affine", "tiled", None), ("affine/backward", "plain", None))
    assert answer(dispatcher, back, pins=pins) == ("any:plain", "", "pinned")


# --- plan and modes ---------------------------------------------------------------------------------------------------


def planned(choice, device=H200, problem=PROBLEM):
    return Plan({(device.fingerprint, problem): choice})


def test_a_plan_wins_over_tables_and_silences_them(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], block=64)
    record(stores[USER], problem=fakes.problem(rows=2048), block=64)
    dispatcher.plan = planned(Choice("cuda:tiled", Config(block=128)))
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "plan")
    # What it lacks is answered by one rule on every rank.
    assert answer(dispatcher, fakes.problem(rows=2048)) == ("cuda:tiled", "block=32", "heuristic")
    assert answer(dispatcher, device=H100) == ("cuda:tiled", "block=32", "heuristic")
    assert answer(dispatcher, pins=(("affine", "plain", None),)) == ("any:plain", "", "pinned")
    dispatcher.plan = planned(Choice("cuda:gone", Config()))
    assert answer(dispatcher) == ("cuda:tiled", "block=32", "heuristic")


def test_a_plan_can_hold_the_reference(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path)
    dispatcher.plan = planned(Choice("any:reference", Config()))
    assert answer(dispatcher) == ("any:reference", "", "plan")


def test_after_freeze_tables_decide_neither_a_pins_config_nor_what_plugin_may_run(tmp_path):
    dispatcher, stores = fakes.dispatcher(
        tmp_path, cat=fakes.catalog(fakes.implementation("mine"), own=[fakes.tiled()])
    )
    samples = [fakes.sample(PROBLEM, block=64), fakes.sample(PROBLEM, implementation="any:mine", block=None)]
    stores[USER].record(H200, "affine", samples=samples)
    pins = (("affine", "tiled", None),)
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=64", "pinned")
    assert answer(dispatcher, budget=10) == ("any:mine", "", "heuristic")
    dispatcher.plan = planned(Choice("cuda:tiled", Config(block=128)))
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=128", "pinned")
    assert answer(dispatcher, budget=10) == ("any:reference", "", "reference")
    dispatcher.plan = Plan({})
    assert answer(dispatcher, pins=pins) == ("cuda:tiled", "block=32", "pinned")


class Unreadable:
    """A store that must not be asked."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked of a table store")


@pytest.mark.parametrize("own", [None, []], ids=["own", "plugin"])
def test_off_and_capture_read_no_table(tmp_path, own):
    dispatcher, _ = fakes.dispatcher(tmp_path, cat=fakes.catalog(fakes.implementation("mine"), own=own))
    dispatcher.sources = [type(s)(s.kind, Unreadable()) for s in dispatcher.sources]
    dispatcher.on_miss = lambda *args: pytest.fail("a miss was recorded")
    expected = "cuda:tiled" if own is None else "any:reference"
    assert dispatcher.decide_without_io(PROBLEM, H200).implementation.id == expected
    assert dispatcher.decide_without_io(PROBLEM, H200, Terms((("affine", "mine", None),))).source == "pinned"
    dispatcher.plan = planned(Choice("any:mine", Config()))
    assert dispatcher.decide_without_io(PROBLEM, H200).source == "plan"
    dispatcher.plan, dispatcher.mode, dispatcher.on_miss = None, "off", None
    assert dispatcher.decide(PROBLEM, H200).implementation.id == expected
    assert answer(dispatcher, pins=(("affine", "mine", None),)) == ("any:mine", "", "pinned")


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (fakes.problem(hidden=512), "hidden 256/512"),
        (fakes.problem(rows=4096), "rows 1024/4096"),
        (fakes.problem(exact=True), "exact None/True"),
        (
            fakes.Problem(
                "affine", "default", "forward", PROBLEM.dims, Fields(x="float16", w="bfloat16"), PROBLEM.flags
            ),
            "x bfloat16/float16",
        ),
    ],
)
def test_strict_raises_and_names_the_field_that_differs(tmp_path, other, difference):
    dispatcher, stores = fakes.dispatcher(tmp_path, mode="strict")
    record(stores[USER], problem=fakes.problem(rows=7, hidden=7, phase=BACKWARD))
    record(stores[USER], problem=other)
    with pytest.raises(StrictMissError) as caught:
        dispatcher.decide(PROBLEM, H200)
    assert f"the nearest entry differs in {difference}" in caught.value.why
    assert "warmup" in caught.value.fix
    assert isinstance(caught.value, LookupError)


def test_strict_on_an_empty_or_stale_table(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path, mode="strict")
    with pytest.raises(StrictMissError, match=r"best answer would be cuda:tiled\(block=32\) source=heuristic"):
        dispatcher.decide(PROBLEM, H200)
    record(stores[USER], triton="3.1")
    with pytest.raises(StrictMissError) as caught:
        dispatcher.decide(PROBLEM, H200)
    assert "stale: measured with Triton 3.1" in caught.value.why
    assert "differs in" not in caught.value.why


@pytest.mark.parametrize("hit", ["pinned", "plan", "exact", "shipped"])
def test_strict_takes_hits(tmp_path, hit):
    dispatcher, stores = fakes.dispatcher(tmp_path, mode="strict")
    terms = Terms((("affine", "plain", None),)) if hit == "pinned" else Terms()
    if hit == "plan":
        dispatcher.plan = planned(Choice("any:plain", Config()))
    elif hit != "pinned":
        record(stores[USER if hit == "exact" else SHIPPED_TABLES])
    assert dispatcher.decide(PROBLEM, H200, terms).source == hit


def test_misses_are_what_no_hit_answers(tmp_path):
    missed = []
    dispatcher, stores = fakes.dispatcher(
        tmp_path, on_miss=lambda problem, device: bool(missed.append((problem, device.sku)))
    )
    record(stores[USER])
    dispatcher.decide(PROBLEM, H200)
    assert missed == []
    far = fakes.problem(rows=4096)
    dispatcher.decide(far, H200)
    assert missed == [(far, "h200")]
    ask(dispatcher, far)  # a traced question records nothing
    assert len(missed) == 1
    assert set(HITS) < set(TIERS)


def test_tuning_on_a_miss_happens_once_for_many_threads(tmp_path):
    tuned = []

    def tune(problem, device):
        tuned.append(problem)
        record(stores[USER], problem=problem, block=128)
        return True

    dispatcher, stores = fakes.dispatcher(tmp_path, mode="tune", on_miss=tune)
    found = []
    threads = [threading.Thread(target=lambda: found.append(dispatcher.decide(PROBLEM, H200))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tuned == [PROBLEM]
    assert {(d.source, d.config.block) for d in found} == {("exact", 128)}


def test_the_trace_names_every_answer(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], block=7)
    record(stores[SHIPPED_TABLES], implementation="cuda:gone", block=64)
    _, trace = ask(dispatcher)
    assert [(c.tier, c.accepted) for c in trace] == [
        ("exact", False),
        ("near", False),
        ("shipped", False),
        ("shipped-near", False),
        ("heuristic", True),
    ]
    assert "not declared" in trace[0].reason
    assert str(ask(dispatcher)[0]) == "cuda:tiled(block=32) source=heuristic, untuned"


def test_differences():
    assert differences(PROBLEM, PROBLEM) == []
    assert differences(PROBLEM, fakes.problem(rows=1, phase=BACKWARD)) == [
        "phase forward/backward",
        "rows 1024/1",
        "needs None/x,w",
    ]


def two_schemes(tmp_path, **options):
    op = fakes.make_op()
    first = op.schemes[0]
    op = dataclasses.replace(op, schemes=(first, dataclasses.replace(first, name="other")))
    return fakes.dispatcher(tmp_path, cat=fakes.catalog(op=op), **options)


@pytest.mark.parametrize(("store", "source"), [(USER, "exact"), (SHIPPED_TABLES, "shipped")])
def test_a_scheme_is_a_decision_of_its_own(tmp_path, store, source):
    dispatcher, stores = two_schemes(tmp_path)
    asked = fakes.Problem("affine", "", SCHEME, PROBLEM.dims, PROBLEM.dtypes, PROBLEM.flags)
    first = dispatcher.decide_scheme(asked, H200)
    assert (first.scheme, first.source) == ("default", "heuristic")
    entry = fakes.stored(asked, "scheme:other", None, source="whatever")
    stores[store].record(H200, "affine", decisions=[entry])
    found = dispatcher.decide_scheme(asked, H200)
    assert (found.scheme, found.source) == ("other", source)
    gone = fakes.stored(asked, "scheme:gone", None, source="whatever")
    stores[store].record(H200, "affine", decisions=[gone])
    assert dispatcher.decide_scheme(asked, H200).scheme == "default"
    dispatcher.plan = Plan({(H200.fingerprint, asked): found.choice})
    assert dispatcher.decide_scheme(asked, H200).source == "plan"


def test_strict_holds_for_schemes_too(tmp_path):
    dispatcher, _ = two_schemes(tmp_path, mode="strict")
    asked = fakes.Problem("affine", "", SCHEME, PROBLEM.dims, PROBLEM.dtypes, PROBLEM.flags)
    with pytest.raises(StrictMissError):
        dispatcher.decide_scheme(asked, H200)
