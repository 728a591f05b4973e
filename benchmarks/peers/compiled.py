"""``torch.compile`` of the formula, each case anew, with static shapes: it has all the advantages it can have."""

from __future__ import annotations

import torch

from benchmarks.cases import Case
from benchmarks.inputs import Call, Inputs, formula
from benchmarks.peers import Peer


def make(case: Case, inputs: Inputs) -> Call:
    """The compiled formula; its logits are fp32 in registers, where that costs nothing."""
    # One code object serves all cases, and after eight shapes Dynamo would give up on it.
    torch._dynamo.reset()
    return torch.compile(formula(case, wide=True), dynamic=False)


PEERS = {"compile": Peer("compile", make)}
