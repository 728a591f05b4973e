"""quack-kernels: norms and losses written in CuTe's Python. Optional: it needs nvidia-cutlass-dsl.

Its chunked loss takes its default kernels: tuning them takes minutes a shape.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import EPS, Call, Inputs
from benchmarks.peers import Peer

#: Rows of a slab of its chunked loss, its default.
CHUNK = 4096


def make(case: Case, inputs: Inputs) -> Call | None:
    """The call of a case; its layer norm has no backward through autograd, its loss no cap."""
    quack: Any = importlib.import_module("quack")

    if case.op == "rms_norm" and case.casting in ("llama", "gemma"):
        return lambda x, weight: quack.rmsnorm(x, weight, eps=EPS, weight_offset=case.offset)
    if case.op == "fused_add_rms_norm":

        def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            found = quack.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True, weight_offset=case.offset)
            return found[0], found[1]

        return add_norm
    if case.op == "cross_entropy" and not case.softcap:
        return lambda logits, target: quack.cross_entropy(
            logits, target, reduction="mean", inplace_backward=case.in_place
        )
    if case.op == "fused_linear_cross_entropy" and not case.softcap:
        linear: Any = importlib.import_module("quack.linear_cross_entropy")
        chunked = linear.chunked_linear_cross_entropy
        return lambda hidden, weight, target: chunked(hidden, weight, target, chunk_size=CHUNK, tuned=False)
    return None


PEERS = {"quack": Peer("quack", make, "quack-kernels", "quack", gpu=True)}
