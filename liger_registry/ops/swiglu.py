"""``swiglu``: ``silu(gate) * up`` (Shazeer, 2020), with the roundings of transformers' gated MLPs.

``y = round(round(silu(g)) * up)`` with ``silu(g) = g / (1 + exp(-g))``; see ``_gated`` for shapes, packed tensors and
dtypes. With multipliers, as Falcon H1 has them, ``g = round(gate_multiplier * gate)`` and
``y = round(down_multiplier * round(round(silu(g)) * up))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.op import Option
from liger_registry.ops._gated import family, gated_op, halves

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture
    from liger_registry.config import Scalar
    from liger_registry.problem import Problem

#: What stands for multipliers that are not 1; a product with either rounds in bf16.
MULTIPLIERS = {"gate_multiplier": 0.884, "down_multiplier": -1.3}


def reference(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> torch.Tensor:
    """``silu(gate) * up`` in plain, differentiable PyTorch.

    Args:
        gate: (..., width), floating; without ``up`` packed, (..., 2 * width).
        up: (..., width), or None.
        gate_multiplier: a factor on the gate.
        down_multiplier: a factor on the result.
    """
    import torch

    gate, up = halves(gate, up)
    if gate_multiplier != 1.0:
        gate = gate * gate_multiplier
    y = torch.nn.functional.silu(gate) * up
    return y if down_multiplier == 1.0 else y * down_multiplier


def _terms(gate: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    share = gate.sigmoid()
    return gate * share, share + gate.abs() * share * (-gate).sigmoid(), gate


def _flags(options: Mapping[str, Any]) -> Mapping[str, Scalar]:
    return {"scaled": options["gate_multiplier"] != 1.0 or options["down_multiplier"] != 1.0}


def _fixed(problem: Problem) -> Mapping[str, Scalar]:
    return MULTIPLIERS if problem.flags.get("scaled") else {}


def _flags_of(architecture: Architecture) -> Mapping[str, Scalar] | None:
    if architecture.activation not in ("silu", "swish"):
        return None
    return {"scaled": family(architecture) == "falcon_h1"}


OP = gated_op(
    "swiglu",
    doc="silu(gate) * up, of two tensors or of one that holds both.",
    reference=reference,
    terms=_terms,
    options=(
        Option("gate_multiplier", float, 1.0, doc="a factor on the gate, rounded before the activation; Falcon H1"),
        Option("down_multiplier", float, 1.0, doc="a factor on the result"),
    ),
    flags=_flags,
    variants=({"scaled": False}, {"scaled": True}),
    flags_of=_flags_of,
    fixed=_fixed,
)
