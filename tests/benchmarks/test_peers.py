"""Who is measured: ours in its states, and others as far as they are there."""

from __future__ import annotations

import pytest
import torch

from benchmarks import models
from benchmarks.cases import Case
from benchmarks.inputs import formula, make, outputs_of, relative_error
from benchmarks.measure import step
from benchmarks.peers import MODULES, Peer, ours, peers, present
from benchmarks.table import TABLE
from benchmarks.warm import cases, problems_of
from liger_registry import registry
from liger_registry.device import Device
from liger_registry.errors import RegistryError
from liger_registry.problem import SCHEME

CPU = torch.device("cpu")
CASES = list(dict.fromkeys(row.case.tiny() for row in (*TABLE, *models.rows())))
NORM = Case("rms_norm", (8, 16))


@pytest.fixture
def other(monkeypatch):
    def use(name):
        monkeypatch.setattr(ours, "OTHER", [name])

    return use


def test_every_name_has_its_peer():
    assert list(peers()) == list(MODULES)
    assert all(peer.name == name for name, peer in peers().items())
    with pytest.raises(ValueError, match="no peer is called 'ligar'"):
        peers(("ligar",))


def test_an_absent_peer_is_named_with_the_reason():
    found = {
        "there": Peer("there", lambda case, inputs: None),
        "missing": Peer("missing", lambda case, inputs: None, "no-such-distribution-1234"),
        "gpu": Peer("gpu", lambda case, inputs: None, gpu=True),
        "broken": Peer("broken", lambda case, inputs: None, module="no_such_module_1234"),
    }
    there, absent = present(found, CPU)
    assert list(there) == ["there"]
    assert absent["missing"] == "not installed"
    assert absent["gpu"] == "needs a GPU"
    assert absent["broken"].startswith("ModuleNotFoundError")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_computes_what_the_formula_does(case):
    inputs = make(case, CPU)
    exact = formula(case, wide=True)
    right = step(exact, inputs)
    values = outputs_of(exact(*inputs.tensors))
    for make_call in (ours.make, ours.make_default):
        call, mine = make_call(case, inputs), inputs.clone()
        assert relative_error(outputs_of(call(*mine.tensors)), values) < 0.02
        assert relative_error(step(call, inputs.clone()), right) < 0.02


def test_the_default_reads_no_table():
    registry = ours.untabled()
    assert registry.settings.mode == "off"
    assert registry.settings.pins == ()
    assert ours.untabled() is registry
    assert "source=heuristic" in ours.decisions("default", NORM, make(NORM, CPU))[0]


def test_another_devices_choice_is_pinned(other):
    other("cpu")
    inputs = make(NORM, CPU)
    assert ours.decisions("other", NORM, inputs)[0].startswith("rms_norm/forward: any:")
    right = formula(NORM)(*inputs.tensors)
    assert relative_error(outputs_of(ours.make_other(NORM, inputs)(*inputs.tensors)), (right,)) < 0.02


def test_another_devices_choice_that_cannot_run_here_raises(other):
    other("a100")
    inputs = make(NORM, CPU)
    assert "cuda:" in ours.decisions("other", NORM, inputs)[0]
    with pytest.raises(RegistryError):
        ours.make_other(NORM, inputs)(*inputs.tensors)


def test_stages_of_composites_are_pinned_too():
    case = Case("fused_linear_cross_entropy", (24, 16, 96))
    inputs = make(case, CPU)
    asked = ours.problems(case, inputs, ours.handle_of(case, inputs))
    pins = ours.pins_of(asked, Device.parse("a100"))
    assert {op for op, _ in pins} == {"fused_linear_cross_entropy", "logit_statistics"}
    assert {phase for op, phase in pins if op == "logit_statistics"} == {"forward", "backward"}


def test_a_budget_is_what_its_slab_takes():
    inputs = make(Case("fused_linear_cross_entropy", (24, 16, 96), slab_rows=8), CPU)
    budgets = [
        ours.budget_of(Case("fused_linear_cross_entropy", (24, 16, 96), slab_rows=rows), inputs, registry)
        for rows in (0, 8, 16)
    ]
    assert budgets[0] is None
    # Eight rows more: eight rows of logits, pitched to 128 columns, and of hidden states and gradients, 16 bits each.
    assert budgets[2] - budgets[1] >= 8 * (128 + 2 * 16) * 2
    assert ours.options_of(Case("fused_linear_cross_entropy", (24, 16, 96), slab_rows=8))["accumulate"] == "input"


def test_warming_asks_for_what_is_measured():
    case = Case("fused_linear_cross_entropy", (24, 16, 96))
    found = problems_of(case, CPU)
    ops = [problem.op for problem in found]
    assert ops.index("logit_statistics") < ops.index("fused_linear_cross_entropy")  # stages come first
    assert any(problem.phase == SCHEME for problem in found)
    inputs = make(case, CPU)
    asked = [problem for problem, _ in ours.problems(case, inputs, ours.handle_of(case, inputs))]
    assert set(asked) <= set(found)
    assert [problem.phase for problem in problems_of(NORM, CPU)] == ["forward", "backward"]


def test_warming_takes_each_case_once():
    assert len(cases(["rms_norm"], models=False)) == 5
    assert len(cases(["rms_norm"], models=False, tiny=True)) == 1


@pytest.mark.ci
def test_trls_head_is_called_as_its_trainers_do():
    pytest.importorskip("trl")
    case = Case("linear_logp", (24, 16, 96), ignored=0.25)
    inputs = make(case, CPU)
    there, _ = present(peers(("trl",)), CPU)
    call = there["trl"].make(case, inputs)
    assert call is not None
    assert relative_error((call(*inputs.tensors),), (formula(case)(*inputs.tensors),)) < 0.02
    assert there["trl"].make(NORM, inputs) is None
