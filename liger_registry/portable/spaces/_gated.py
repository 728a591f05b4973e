"""The PyTorch implementations of ``swiglu``, ``geglu`` and ``relu_squared``; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Implementation

if TYPE_CHECKING:
    from liger_registry import Config, Problem

_WIDTH = {"float64": 8, "float32": 4}


def _elements(problem: Problem) -> int:
    return int(problem.rows) * int(problem.width)


def _eager_bytes(problem: Problem, config: Config) -> int:
    widest = max(_WIDTH.get(str(dtype), 2) for dtype in problem.dtypes.values())
    # Backward holds gate, gradient, activation and a product in fp32.
    return _elements(problem) * (widest if problem.phase == "forward" else 4 * max(widest, 4))


def _functional_bytes(problem: Problem, config: Config) -> int:
    widest = max(_WIDTH.get(str(dtype), 2) for dtype in problem.dtypes.values())
    return _elements(problem) * widest * (1 if problem.phase == "forward" else 3)


def implementations(op: str, functions: str = "") -> tuple[Implementation, ...]:
    """Both phases of an operation, whose launch functions' names begin with ``functions``."""
    return tuple(
        Implementation(
            op=op,
            phase=phase,
            name=name,
            launch=f"liger_registry.portable.gated:{functions}{phase}_{name}",
            extra_bytes=extra_bytes,
            doc=doc,
        )
        for phase in ("forward", "backward")
        for name, extra_bytes, doc in (
            ("eager", _eager_bytes, "the models' formula in PyTorch operations, its derivative rounded once"),
            ("functional", _functional_bytes, "torch's own kernels in the tensors' dtypes, written over what is done"),
        )
    )
