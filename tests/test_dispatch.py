"""Each tier answers in its order, every answer is held against legality, and the source says where it came from.

Tables are real stores below a temporary directory; the devices need not be there.
"""

from __future__ import annotations

import itertools

import fakes
import pytest
import torch

from liger_registry import Config, Device
from liger_registry.config import Fields
from liger_registry.decision import CLUSTER, SHIPPED_TABLES, USER, Terms
from liger_registry.errors import NoImplementationError
from liger_registry.problem import BACKWARD
from liger_registry.reference import reference_implementation

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


def test_nothing_known_gives_the_first_heuristic_in_the_contracts_order(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path)
    assert answer(dispatcher) == ("cuda:tiled", "block=32", "heuristic")
    assert answer(dispatcher, device=fakes.CPU) == ("any:plain", "", "heuristic")
    assert answer(dispatcher, device=fakes.MI300X) == ("rocm:tiled", "block=32", "heuristic")
    assert answer(dispatcher, fakes.problem(phase=BACKWARD)) == ("cuda:tiled", "block=32", "heuristic")
    # Illegal for a narrow row, so the next in order.
    assert answer(dispatcher, fakes.problem(hidden=16)) == ("any:plain", "", "heuristic")


# --- the order of the tiers -------------------------------------------------------------------------------------------


def test_exact_wins_over_all_other_tables(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[SHIPPED_TABLES], block=128)
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "shipped")
    record(stores[CLUSTER], block=64)
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "exact")
    record(stores[USER], block=32)
    decision, _ = ask(dispatcher)
    assert (decision.config.block, decision.source, decision.detail) == (32, "exact", "user")


@pytest.mark.parametrize(
    ("changes", "detail"),
    [({"triton": "3.1"}, "measured with Triton 3.1"), ({"source": "0" * 12}, "its source has changed since")],
)
def test_stale_answers_are_used_and_labelled(tmp_path, changes, detail):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], block=64, **changes)
    decision, _ = ask(dispatcher)
    assert (decision.config.block, decision.source) == (64, "stale")
    assert detail in decision.detail
    # A fresh one of the cluster comes before a stale one of the user.
    record(stores[CLUSTER], block=128)
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "exact")


def test_plain_torch_does_not_go_stale_with_triton(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], implementation="any:plain", block=None, triton="3.1")
    assert answer(dispatcher) == ("any:plain", "", "exact")


def test_stale_wins_over_near_and_shipped(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], problem=fakes.problem(rows=2048), block=32)
    record(stores[SHIPPED_TABLES], block=32)
    record(stores[CLUSTER], block=128, triton="3.1")
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "stale")
    record(stores[USER], block=64, triton="3.1")
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "stale")


def test_near_is_the_nearest_bucket(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[SHIPPED_TABLES], block=32)
    record(stores[USER], problem=fakes.problem(rows=65536), block=128)
    record(stores[USER], problem=fakes.problem(rows=4096), block=64)
    decision, _ = ask(dispatcher)
    assert (decision.config.block, decision.source) == (64, "near")
    assert decision.detail == "user, measured at hidden=256,rows=4096"
    assert answer(dispatcher, fakes.problem(rows=2**20)) == ("cuda:tiled", "block=128", "near")


@pytest.mark.parametrize(
    "other",
    [
        fakes.problem(hidden=512),
        fakes.problem(phase=BACKWARD),
        fakes.problem(exact=True),
        fakes.Problem("affine", "default", "forward", PROBLEM.dims, Fields(x="float32", w="float32"), PROBLEM.flags),
    ],
    ids=lambda p: p.text,
)
def test_near_never_crosses_an_exact_dim_a_dtype_a_flag_or_a_phase(tmp_path, other):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    for kind, device in itertools.product((USER, SHIPPED_TABLES), (H200, H100)):
        record(stores[kind], device, problem=other, block=128)
    assert answer(dispatcher) == ("cuda:tiled", "block=32", "heuristic")


def test_cluster_tables_come_after_the_users_within_each_tier(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[CLUSTER], problem=fakes.problem(rows=1024 * 2), block=128)
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "near")
    record(stores[USER], problem=fakes.problem(rows=1024 * 64), block=64)
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "near")
    record(stores[CLUSTER], block=128)
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "exact")


def test_shipped_then_shipped_near_then_sibling(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[SHIPPED_TABLES], H100, block=32)
    decision, _ = ask(dispatcher)
    assert (decision.source, decision.detail) == ("sibling", "measured on h100-sxm-132, hidden=256,rows=1024")
    record(stores[SHIPPED_TABLES], problem=fakes.problem(rows=4096), block=64)
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "shipped-near")
    record(stores[SHIPPED_TABLES], block=128)
    assert answer(dispatcher) == ("cuda:tiled", "block=128", "shipped")
    record(stores[SHIPPED_TABLES], block=128, triton="3.1")
    decision, _ = ask(dispatcher)
    assert decision.source == "shipped"
    assert "measured with Triton 3.1" in decision.detail
    # The user's own, though only near, comes before what was shipped.
    record(stores[USER], problem=fakes.problem(rows=4096), block=64)
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "near")


def test_an_h100_is_answered_from_an_h200_table(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[SHIPPED_TABLES], Device.parse("h200"), block=128)
    device = Device.parse("h100-sxm")
    decision, _ = ask(dispatcher, device=device)
    assert (decision.implementation.id, decision.config.block, decision.source) == ("cuda:tiled", 128, "sibling")
    assert "h200-132" in decision.detail
    # Another bucket is answered too, an exact problem of a farther sibling before a near one of a nearer.
    assert answer(dispatcher, fakes.problem(rows=8192), device) == ("cuda:tiled", "block=128", "sibling")
    record(stores[USER], Device.parse("h100-pcie"), fakes.problem(rows=8192), block=64)
    assert answer(dispatcher, fakes.problem(rows=8192), device) == ("cuda:tiled", "block=64", "sibling")


def test_siblings_are_asked_nearest_first(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], Device.parse("h100-pcie"), block=32)
    record(stores[USER], Device.parse("h100-nvl"), block=64)
    record(stores[USER], Device.parse("h200"), block=128)
    assert fakes.H100.siblings[0] == "h200"
    assert answer(dispatcher, device=H100) == ("cuda:tiled", "block=128", "sibling")


@pytest.mark.parametrize("device", ["a100", "mi300x", "b200", "cpu"])
def test_architectures_and_vendors_never_cross(tmp_path, device):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    for store in stores.values():
        record(store, H200, block=128)
    assert answer(dispatcher, device=Device.parse(device))[2] == "heuristic"


# --- legality of what tables say --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["exact", "stale", "near", "shipped", "shipped-near", "sibling"])
@pytest.mark.parametrize(
    "entry",
    [{"block": 7}, {"block": None}, {"implementation": "cuda:gone"}, {"implementation": "rocm:tiled"}],
    ids=["outside", "incomplete", "gone", "other-vendor"],
)
def test_answers_that_are_not_legal_fall_through(tmp_path, tier, entry):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    entry = {"block": 32, **entry}
    kind = SHIPPED_TABLES if tier in ("shipped", "shipped-near", "sibling") else USER
    problem = fakes.problem(rows=2048) if tier in ("near", "shipped-near") else PROBLEM
    changes = {"triton": "3.1"} if tier == "stale" else {}
    record(stores[kind], H100 if tier == "sibling" else H200, problem, **entry, **changes)
    decision, trace = ask(dispatcher)
    assert (decision.source, decision.config.text) == ("heuristic", "block=32")
    assert any(not c.accepted and c.reason for c in trace)


def test_the_budget_is_legality(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    record(stores[USER], block=128)
    record(stores[SHIPPED_TABLES], block=64)
    assert answer(dispatcher, budget=12800) == ("cuda:tiled", "block=128", "exact")
    assert answer(dispatcher, budget=12799) == ("cuda:tiled", "block=64", "shipped")
    assert answer(dispatcher, budget=6399) == ("cuda:tiled", "block=32", "heuristic")
    assert answer(dispatcher, budget=100) == ("any:plain", "", "heuristic")
    assert answer(dispatcher, budget=0) == ("any:plain", "", "heuristic")


def test_the_deterministic_filter(tmp_path):
    own = [fakes.tiled(deterministic=False), fakes.implementation("plain")]
    dispatcher, stores = fakes.dispatcher(tmp_path, cat=fakes.catalog(own=own))
    record(stores[USER], block=64)
    assert answer(dispatcher) == ("cuda:tiled", "block=64", "exact")
    assert answer(dispatcher, deterministic=True) == ("any:plain", "", "heuristic")
    with pytest.raises(NoImplementationError, match="not deterministic"):
        ask(dispatcher, deterministic=True, pins=(("affine", "tiled", None),))


def test_the_reference_is_the_last_resort(tmp_path):
    dispatcher, _ = fakes.dispatcher(tmp_path, cat=fakes.catalog(own=[fakes.tiled()]))
    assert answer(dispatcher, device=fakes.CPU) == ("any:reference", "", "reference")
    assert answer(dispatcher, fakes.problem(phase=BACKWARD)) == ("any:reference", "", "reference")


def test_the_reference_computes_both_phases():
    op = fakes.make_op()
    x, w, dy = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    options = {"gain": 2.0, "style": "plain", "steps": 1, "exact": False}
    forward = reference_implementation(op, PROBLEM).bind(Config(), fakes.CPU, options)
    assert torch.equal(forward(x, w)[0], 2 * x * w)
    backward = reference_implementation(op, fakes.problem(phase=BACKWARD))
    dx, dw = backward.bind(Config(), fakes.CPU, options, (True, True))(dy, x, w)
    assert torch.allclose(dx, 2 * dy * w)
    assert torch.allclose(dw, (2 * dy * x).sum(0))
    assert backward.bind(Config(), fakes.CPU, options, (False, True))(dy, x, None) == (None, None)


# --- plugins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["stale", "shipped", "shipped-near", "sibling", "heuristic"])
def test_a_plugin_is_not_chosen_before_it_was_verified_here(tmp_path, tier):
    own = [] if tier == "heuristic" else [fakes.implementation("plain")]
    cat = fakes.catalog(fakes.tiled(), own=own)
    dispatcher, stores = fakes.dispatcher(tmp_path, cat=cat)
    kind = USER if tier == "stale" else SHIPPED_TABLES
    problem = fakes.problem(rows=2048) if tier == "shipped-near" else PROBLEM
    changes = {"source": "0" * 12} if tier == "stale" else {}
    if tier != "heuristic":
        record(stores[kind], H100 if tier == "sibling" else H200, problem, block=64, **changes)
    decision, trace = ask(dispatcher)
    assert decision.implementation.own
    assert any("not verified on this device" in c.reason for c in trace)
    # Verified on this device, by any of the user's tables: it may be chosen.
    stores[USER].record(H200, "affine", samples=[fakes.sample(fakes.problem(rows=64, hidden=512), block=64)])
    decision, _ = ask(dispatcher)
    assert decision.implementation.id == "cuda:tiled"
    assert decision.source == tier
    # One wrong result is one too many.
    stores[USER].record(H200, "affine", samples=[fakes.sample(fakes.problem(rows=64, hidden=512), status="wrong")])
    assert ask(dispatcher)[0].implementation.own


@pytest.mark.parametrize(
    "entry",
    [{"status": "wrong"}, {"status": "crash"}, {"source": "0" * 12}, {"implementation": "rocm:tiled"}],
    ids=str,
)
def test_what_is_no_proof(tmp_path, entry):
    dispatcher, stores = fakes.dispatcher(tmp_path, cat=fakes.catalog(fakes.tiled(), own=[]))
    stores[USER].record(H200, "affine", samples=[fakes.sample(PROBLEM, block=64, **entry)])
    stores[USER].record(H100, "affine", samples=[fakes.sample(PROBLEM, block=64)])
    stores[SHIPPED_TABLES].record(H200, "affine", samples=[fakes.sample(PROBLEM, block=64)])
    assert answer(dispatcher)[2] == "reference"


def test_a_plugin_that_was_measured_here_wins_on_merit(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path, fakes.tiled(vendor="any"))
    record(stores[USER], implementation="any:tiled", block=64)
    assert answer(dispatcher) == ("any:tiled", "block=64", "exact")
    assert answer(dispatcher, fakes.problem(rows=2048)) == ("any:tiled", "block=64", "near")


def test_own_implementations_come_first_whatever_a_plugin_calls_its_own(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path, fakes.tiled(vendor="any"))
    stores[USER].record(fakes.CPU, "affine", samples=[fakes.sample(PROBLEM, implementation="any:tiled", block=64)])
    assert answer(dispatcher, device=fakes.CPU) == ("any:plain", "", "heuristic")
