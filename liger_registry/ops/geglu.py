"""``geglu``: ``gelu(gate) * up`` (Shazeer, 2020), with the roundings of transformers' gated MLPs.

``y = round(round(gelu(gate)) * up)``; see ``_gated`` for shapes, packed tensors and dtypes. ``approximate`` is that of
``torch.nn.functional.gelu`` (Hendrycks and Gimpel, 2016):

====== ==================================================================
tanh   ``0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))``, Gemma's
none   ``0.5 g (1 + erf(g / sqrt(2)))``
====== ==================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.op import Option
from liger_registry.ops._gated import gated_op, halves

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture
    from liger_registry.config import Scalar

APPROXIMATIONS = ("tanh", "none")
# By the names that configs give the activations. Others (gelu_new, gelu_fast) round after each operation.
_NAMES = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}


def reference(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(gate) * up`` in plain, differentiable PyTorch.

    Args:
        gate: (..., width), floating; without ``up`` packed, (..., 2 * width).
        up: (..., width), or None.
        approximate: ``tanh``, or ``none`` for the error function.
    """
    import torch

    gate, up = halves(gate, up)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


# Both formulas add 1 and what may be nearly -1, which costs 2^-24 of x in fp32. In units of bf16, which are 2^-8, that
# is 2^-16; nobody who computes them as they are written does better, and this much is no fault.
_CANCELLED = 2.0**-16


def _terms(gate: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    size = gate.abs()
    if options["approximate"] == "none":
        exponent = 0.5 * gate * size
        share, density = torch.special.ndtr(gate), torch.exp(-exponent.abs()) / math.sqrt(2 * math.pi)
    else:
        factor = math.sqrt(8 / math.pi)
        exponent = factor * gate * (1 + 0.044715 * gate * gate)
        share = exponent.sigmoid()
        density = share * (-exponent).sigmoid() * factor * (1 + 3 * 0.044715 * gate * gate)
    return size * (share + _CANCELLED), share + size * density + (1 + size) * _CANCELLED, exponent


def _flags(options: Mapping[str, Any]) -> Mapping[str, Scalar]:
    return {"approximate": options["approximate"]}


def _flags_of(architecture: Architecture) -> Mapping[str, Scalar] | None:
    # With layer norms the MLPs that use gelu have no gate.
    if architecture.activation not in _NAMES or architecture.norm != "rms_norm":
        return None
    return {"approximate": _NAMES[architecture.activation]}


OP = gated_op(
    "geglu",
    doc="gelu(gate) * up, of two tensors or of one that holds both.",
    reference=reference,
    terms=_terms,
    options=(Option("approximate", str, "tanh", choices=APPROXIMATIONS, doc="tanh, or none for the error function"),),
    flags=_flags,
    variants=tuple({"approximate": name} for name in APPROXIMATIONS),
    flags_of=_flags_of,
)
