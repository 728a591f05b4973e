"""One case over candidates that are right, wrong, broken, absent, or write where they should not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.inputs import formula, make
from benchmarks.measure import Bench, short
from benchmarks.peers import Peer
from benchmarks.timing import CpuClock

CPU = torch.device("cpu")
NORM, GATED = Case("rms_norm", (8, 16)), Case("swiglu", (8, 16))


class Silu(torch.autograd.Function):
    """A gated activation whose backward leaves its gradients where its inputs were."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        gate, up = (t.detach() for t in ctx.saved_tensors)
        share = torch.sigmoid(gate)
        by_gate, by_up = upstream * up * share * (1 + gate * (1 - share)), upstream * gate * share
        return gate.copy_(by_gate), up.copy_(by_up)


def bench(log=None, **makers):
    peers = {name: Peer(name, make) for name, make in makers.items()}
    return Bench(CPU, peers, CpuClock(), rounds=3, log=(log if log is not None else []).append)


def eager(case, inputs):
    return formula(case)


def test_a_case_has_times_memory_and_errors_of_each_phase():
    result = bench(eager=eager).measure(NORM, ["forward", "backward"])
    assert set(result.figures) == {"forward", "backward"}
    for phase in ("forward", "backward"):
        assert {"eager.ms", "eager.error", "eager.extra_gib", "eager.host_us"} <= result.figures[phase].keys()
        assert result.figures[phase]["eager.error"] == 0.0
        assert "eager" in result.spread[phase]
    assert result.figures["forward"]["eager.ms"] > 0
    assert (result.method, result.sets, result.failed, result.writes) == ("wall clock", 2, {}, [])


def test_a_loss_is_measured_as_one():
    result = bench(eager=eager).measure(Case("cross_entropy", (8, 32)), ["both"])
    assert result.figures["both"]["eager.ms"] > 0
    assert result.sets == 1


def test_one_that_is_wrong_is_named():
    log = []
    wrong = bench(log, wrong=lambda case, inputs: lambda x, w: formula(case)(x, w) * 1.1)
    result = wrong.measure(NORM, ["forward"])
    assert result.figures["forward"]["wrong.error"] == pytest.approx(0.1, rel=0.05)
    assert any("wrong is off by 0.1" in line for line in log)


def test_one_that_breaks_leaves_the_others():
    log = []

    def broken(case, inputs):
        def call(x, w):
            raise RuntimeError("no such\nkernel")

        return call

    def unmade(case, inputs):
        raise KeyError("nothing")

    result = bench(log, eager=eager, broken=broken, unmade=unmade, none=lambda case, inputs: None).measure(
        NORM, ["forward"]
    )
    assert result.failed == {"broken": "RuntimeError: no such", "unmade": "KeyError: 'nothing'"}
    assert result.figures["forward"]["eager.ms"] > 0
    assert not any(name.startswith(("broken", "none")) for name in result.figures["forward"])


def test_one_that_writes_into_its_inputs_spoils_nobodys():
    seen = []

    def watching(case, inputs):
        def call(gate, up):
            seen.append(gate.detach().clone())
            return formula(case)(gate, up)

        return call

    result = bench(writes=lambda case, inputs: Silu.apply, watching=watching).measure(GATED, ["forward", "backward"])
    assert result.writes == ["writes"]
    assert result.figures["backward"]["writes.error"] < 0.02
    right = [make(GATED, CPU, seed).tensors[0] for seed in range(result.sets)]
    assert all(any(torch.equal(gate, one) for one in right) for gate in seen)


def test_one_that_cannot_be_captured_is_timed_by_events():
    class Refusing(CpuClock):
        def graph(self, sweep, calls):
            raise RuntimeError("operation not permitted when stream is capturing")

    log = []
    tried = Bench(CPU, {"eager": Peer("eager", eager)}, Refusing(), rounds=2, log=log.append)
    result = tried.measure(NORM, ["forward"])
    assert set(result.uncaptured) == {"eager"}
    assert result.figures["forward"]["eager.ms"] > 0
    assert any("cannot be captured" in line for line in log)


def test_errors_are_those_of_the_heads_gradient():
    case = Case("fused_linear_cross_entropy", (64, 16, 48))

    def rough(case, inputs):
        exact = formula(case)
        return lambda x, w, target: exact(x, w, target) * 1.25

    result = bench(eager=eager, rough=rough).measure(case, ["error"])
    assert result.figures["error"]["eager.weight_error"] < 0.01
    assert result.figures["error"]["rough.weight_error"] == pytest.approx(0.25, rel=0.05)


def test_an_exception_in_one_line():
    assert short(ValueError("first\nsecond")) == "ValueError: first"
    assert short(KeyError()) == "KeyError: "
