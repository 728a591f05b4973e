"""liger-kernel: its autograd functions, with the settings of its modules.

Norms get ``in_place=False``, which is no slower and leaves the upstream gradient, which all candidates share, alone.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import EPS, Call, Inputs
from benchmarks.peers import Peer


def make(case: Case, inputs: Inputs) -> Call | None:
    """The call of a case."""
    ops: Any = importlib.import_module("liger_kernel.ops")

    cap: float | None = case.softcap or None

    def norm(x: Tensor, weight: Tensor) -> Any:
        return ops.LigerRMSNormFunction.apply(x, weight, EPS, case.offset, case.casting, False, None)

    def heads(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> Any:
        # As its patched attention does it: norms over the projection's result, then the rotation of what is turned.
        turned = (norm(x.transpose(1, 2), w).transpose(1, 2) for x, w in ((q, qw), (k, kw)))
        return ops.LigerRopeFunction.apply(*turned, cos, sin)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        function = ops.LigerFusedAddRMSNormFunction
        return function.apply(x, residual, weight, EPS, case.offset, case.casting, False)

    def loss(logits: Tensor, target: Tensor) -> Any:
        return ops.LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, "mean", cap, False)[0]

    def linear_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        function = ops.LigerFusedLinearCrossEntropyFunction
        return function.apply(hidden, weight, target, None, None, -100, 0.0, 0.0, "mean", cap)[0]

    found: dict[str, Call] = {
        "rms_norm": norm,
        "fused_add_rms_norm": add_norm,
        "layer_norm": lambda x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, EPS),
        "swiglu": lambda gate, up: ops.LigerSiLUMulFunction.apply(gate, up),
        "geglu": lambda gate, up: ops.LigerGELUMulFunction.apply(gate, up),
        "rope": lambda q, k, cos, sin: ops.LigerRopeFunction.apply(q, k, cos, sin),
        "qk_norm_rope": heads,
        "cross_entropy": loss,
        "fused_linear_cross_entropy": linear_loss,
    }
    return found.get(case.op)


PEERS = {"liger": Peer("liger", make, "liger-kernel", "liger_kernel.ops", gpu=True)}
