"""Apple's cut-cross-entropy, with its defaults: gradients of tokens that hardly matter are left out."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.cases import Case
from benchmarks.inputs import Call, Inputs
from benchmarks.peers import Peer


def make(case: Case, inputs: Inputs) -> Call | None:
    """The call of a case."""
    if case.op != "fused_linear_cross_entropy":
        return None
    cce: Any = importlib.import_module("cut_cross_entropy")
    cap = case.softcap or None
    return lambda hidden, weight, target: cce.linear_cross_entropy(hidden, weight, target, softcap=cap)


PEERS = {"cce": Peer("cce", make, "cut-cross-entropy", "cut_cross_entropy", gpu=True)}
