"""The backward of ``linear_sequence_loss``: gradients that forward holds, times that of the loss, which is nearly 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from liger_registry.kernels.scale import backward_scale_unless_one as scale

if TYPE_CHECKING:
    from liger_registry.device import Device


def backward_scale_unless_one(
    grad_loss: Tensor,
    grad_logp: None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    constants: Tensor,
    bias: Tensor | None,
    held_hidden: Tensor | None,
    held_weight: Tensor | None,
    held_bias: Tensor | None,
    *,
    device: Device,
    **told: Any,
) -> tuple[Tensor | None, ...]:
    """Forward's gradients times the loss', in their own memory, untouched where that is 1."""
    held = held_hidden, held_weight, held_bias
    return scale(grad_loss, None, None, None, hidden, weight, target, bias, None, None, *held, device=device, **told)
