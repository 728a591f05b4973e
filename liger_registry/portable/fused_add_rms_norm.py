"""``fused_add_rms_norm`` in PyTorch operations: the addition, and what ``rms_norm`` has behind it.

Launch functions take ``(x, residual, weight)`` with x and residual (..., hidden), weight (hidden,) or None, and return
``(y, new_residual, rstd)``; backward ones take ``(dy, dnew_residual, weight, new_residual, rstd)`` and return
``(dx, dresidual, dweight)``, None where it is not needed; dx and dresidual are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from liger_registry.portable import rms_norm

if TYPE_CHECKING:
    Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _forward(
    norm: Callable[..., tuple[Tensor, Tensor]], x: Tensor, residual: Tensor, weight: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    new_residual = rms_norm._laid_out_like(x, x + residual)
    y, rstd = norm(new_residual, weight, **options)
    return y, new_residual, rstd


def _backward(
    norm: Callable[..., tuple[Tensor | None, Tensor | None]],
    dy: Tensor,
    dnew_residual: Tensor,
    weight: Tensor | None,
    new_residual: Tensor,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
    **options: Any,
) -> Gradients:
    dx, dweight = norm(dy, new_residual, weight, rstd, needs=(needs[0] or needs[1], needs[2]), **options)
    if dx is not None:
        dx.add_(dnew_residual)  # its own: every norm's gradient is a new tensor
    return dx if needs[0] else None, dx if needs[1] else None, dweight


def forward_eager(x: Tensor, residual: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The model family's formula, one operation after the other; options are those of ``rms_norm``."""
    return _forward(rms_norm.forward_eager, x, residual, weight, **options)


def forward_functional(
    x: Tensor, residual: Tensor, weight: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The addition and torch's fused norm; options are those of ``rms_norm``."""
    return _forward(rms_norm.forward_functional, x, residual, weight, **options)


def forward_row_chunks(
    x: Tensor, residual: Tensor, weight: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The addition and the norm over slabs of rows; options are those of ``rms_norm``, and ``slab_rows``."""
    return _forward(rms_norm.forward_row_chunks, x, residual, weight, **options)


def backward_eager(
    dy: Tensor,
    dnew_residual: Tensor,
    weight: Tensor | None,
    new_residual: Tensor,
    rstd: Tensor,
    *,
    needs: tuple[bool, bool, bool],
    **options: Any,
) -> Gradients:
    """The norm's derivative rounded, then the sum rounded, as autograd does it for the formula."""
    return _backward(rms_norm.backward_eager, dy, dnew_residual, weight, new_residual, rstd, needs, **options)


def backward_functional(
    dy: Tensor,
    dnew_residual: Tensor,
    weight: Tensor | None,
    new_residual: Tensor,
    rstd: Tensor,
    *,
    needs: tuple[bool, bool, bool],
    **options: Any,
) -> Gradients:
    """Torch's fused backward of the norm, and the sum."""
    return _backward(rms_norm.backward_functional, dy, dnew_residual, weight, new_residual, rstd, needs, **options)


def backward_row_chunks(
    dy: Tensor,
    dnew_residual: Tensor,
    weight: Tensor | None,
    new_residual: Tensor,
    rstd: Tensor,
    *,
    needs: tuple[bool, bool, bool],
    **options: Any,
) -> Gradients:
    """The norm's derivative over slabs of rows, and the sum; options have ``slab_rows``."""
    return _backward(rms_norm.backward_row_chunks, dy, dnew_residual, weight, new_residual, rstd, needs, **options)
