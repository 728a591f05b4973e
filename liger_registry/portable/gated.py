"""``swiglu``, ``geglu`` and ``relu_squared`` in PyTorch operations; formulas and roundings are those of the contracts.

Forward functions take ``(gate, up)`` with gate and up (..., width), or a packed gate (..., 2 * width) and None, and
return ``(y,)``; backward ones take ``(dy, gate, up)`` and return a gradient each, None where it is not needed. Those of
``relu_squared`` take ``(x)`` and ``(dy, x)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from liger_registry import Device

    Gradients = tuple[Tensor | None, Tensor | None]


# --- two factors ------------------------------------------------------------------------------------------------------


def forward_eager(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    approximate: str = "",
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> tuple[Tensor]:
    """The formula, one operation after the other."""
    first, second = _halves(gate, up)
    y = _activation(_scaled(first, gate_multiplier), approximate) * second
    return (_laid_out(gate, up, _scaled(y, down_multiplier)),)


def forward_functional(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    approximate: str = "",
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> tuple[Tensor]:
    """The same roundings with the products written over the activation, which is half of the memory."""
    first, second = _halves(gate, up)
    y = _activation(_scaled(first, gate_multiplier), approximate)
    y = y.mul_(second) if torch.promote_types(y.dtype, second.dtype) == y.dtype else y * second
    return (_laid_out(gate, up, y if down_multiplier == 1.0 else y.mul_(down_multiplier)),)


def backward_eager(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    needs: tuple[bool, bool],
    approximate: str = "",
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Gradients:
    """The derivative in fp32 (float64 for float64), each gradient rounded once."""
    first, second = _halves(gate, up)
    wide = torch.promote_types(torch.promote_types(dy.dtype, first.dtype), torch.float32)
    x, grad = _scaled(first.to(wide), gate_multiplier), _scaled(dy.to(wide), down_multiplier)
    dgate, dup, into_gate, into_up = _gradients(gate, up, needs)
    if into_up is not None:
        into_up.copy_(_activation(x, approximate) * grad)
    if into_gate is not None:
        into_gate.copy_(_scaled(_backward(grad * second, x, approximate), gate_multiplier))
    return dgate, dup


def backward_functional(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    device: Device,
    needs: tuple[bool, bool],
    approximate: str = "",
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Gradients:
    """Torch's fused derivatives in the tensors' own dtypes, with the roundings of autograd."""
    first, second = _halves(gate, up)
    x, grad = _scaled(first, gate_multiplier), _scaled(dy, down_multiplier)
    dgate, dup, into_gate, into_up = _gradients(gate, up, needs)
    if into_up is not None:
        _product(_activation(x, approximate), grad, into_up)
    if into_gate is not None:
        dx = _backward((grad * second).to(x.dtype), x, approximate)
        into_gate.copy_(_scaled(dx, gate_multiplier))
    return dgate, dup


# --- one factor -------------------------------------------------------------------------------------------------------


def relu_squared_forward_eager(x: Tensor, *, device: Device) -> tuple[Tensor]:
    """The formula, one operation after the other."""
    return (_laid_out(x, x, torch.square(torch.relu(x))),)


def relu_squared_forward_functional(x: Tensor, *, device: Device) -> tuple[Tensor]:
    """The square written over the positive part, which is half of the memory."""
    return (_laid_out(x, x, torch.relu(x).square_()),)


def relu_squared_backward_eager(dy: Tensor, x: Tensor, *, device: Device, needs: tuple[bool]) -> tuple[Tensor | None]:
    """The derivative, rounded once: doubling is exact, short of an overflow, which comes last."""
    if not needs[0]:
        return (None,)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (_laid_out(x, x, torch.relu(x).to(wide).mul_(dy).mul_(2).to(x.dtype)),)


def relu_squared_backward_functional(
    dy: Tensor, x: Tensor, *, device: Device, needs: tuple[bool]
) -> tuple[Tensor | None]:
    """The derivative in the tensors' own dtype, written over the positive part."""
    if not needs[0]:
        return (None,)
    return (_laid_out(x, x, torch.relu(x).mul_(2).mul_(dy)),)


# --- parts ------------------------------------------------------------------------------------------------------------


def _activation(x: Tensor, approximate: str) -> Tensor:
    return functional.gelu(x, approximate=approximate) if approximate else functional.silu(x)


def _backward(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    """The gradient of an activation, computed in fp32 and rounded to the dtype of both."""
    if approximate:
        found: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    else:
        found = torch.ops.aten.silu_backward(grad, x)
    return found


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def _product(a: Tensor, b: Tensor, into: Tensor) -> None:
    if torch.promote_types(a.dtype, b.dtype) == into.dtype:
        torch.mul(a, b, out=into)
    else:
        into.copy_(a * b)


def _layout(x: Tensor) -> torch.memory_format:
    return torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format


def _gradients(
    gate: Tensor, up: Tensor | None, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Empty gradients of the inputs, and where in them those of gate and up go; None for what is not needed."""
    dgate = torch.empty_like(gate, memory_format=_layout(gate)) if needs[0] else None
    if up is None:
        return (None, None, None, None) if dgate is None else (dgate, None, *_halves(dgate, None))
    dup = torch.empty_like(up, memory_format=_layout(up)) if needs[1] else None
    return dgate, dup, dgate, dup


def _laid_out(gate: Tensor, up: Tensor | None, result: Tensor) -> Tensor:
    """``result`` with the strides that the contract's ``allocate`` gives; nearly always it has them already."""
    if result.is_contiguous() and (up is None or gate.is_contiguous()):
        return result
    if up is None:
        return result.contiguous()
    out = torch.empty_like(gate, dtype=result.dtype, memory_format=_layout(gate))
    return result if result.stride() == out.stride() else out.copy_(result)
