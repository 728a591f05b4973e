"""``torch.nn.functional.linear_cross_entropy`` (torch 2.13) as an implementation of ``fused_linear_cross_entropy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from liger_registry import Device


def available() -> bool:
    """Whether the installed torch has it."""
    return hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    device: Device,
    needs: tuple[bool, ...],
    chunked: bool,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Loss and gradients as PyTorch computes them, in slabs of its own choice if ``chunked``."""
    labels = target.reshape(-1)
    # PyTorch asserts on targets that are no classes, on a GPU in the kernel, which ends the process's use of it.
    lost = (labels != ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))
    with torch.enable_grad():
        leaves = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip((hidden.reshape(-1, hidden.shape[-1]), weight, bias), needs, strict=True)
        ]
        rows, head, offset = leaves
        assert rows is not None
        assert head is not None
        loss = F.linear_cross_entropy(
            rows,
            head,
            labels.masked_fill(lost, ignore_index),
            linear_bias=offset,
            weight=None if class_weight is None else class_weight.to(hidden.dtype),
            reduction="mean" if reduction == "mean" and num_items is None else "sum",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=torch.nn.LinearCrossEntropyOptions() if chunked else None,
        )
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
    grads = [None if x is None or not x.requires_grad else next(found) for x in leaves]
    # A mean that divides by 0 is NaN there.
    counted = labels != ignore_index
    divisor = counted.sum() if num_items is None else num_items
    if class_weight is not None and num_items is None and reduction == "mean":
        divisor = class_weight[labels.masked_fill(lost | ~counted, 0)].masked_fill(lost | ~counted, 0).sum()
    counts = divisor != 0
    result = torch.where(counts, loss.detach().float(), 0.0)
    grads = [None if g is None else torch.where(counts, g, 0.0) for g in grads]
    if num_items is not None:
        items = num_items.masked_fill(~counts, 1)
        result, grads = result / items, [None if g is None else g / items.to(g.dtype) for g in grads]
    result = torch.where(lost.any(), torch.nan, result)
    grad_hidden, grad_weight, grad_bias = grads
    if grad_hidden is not None:
        grad_hidden = grad_hidden.masked_fill(lost[:, None], torch.nan).view(hidden.shape)
    return result, None, None, None, grad_hidden, grad_weight, grad_bias
