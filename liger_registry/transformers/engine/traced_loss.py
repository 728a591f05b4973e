"""The fused cross-entropy of ``TracedLogits``, as Dynamo traces it: one operation of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_registry.runtime import registry

if TYPE_CHECKING:
    from liger_registry.transformers.engine.traced import TracedLogits


def cross_entropy(
    input: TracedLogits,
    target: Any,  # noqa: ANN401
    weight: Any = None,  # noqa: ANN401
    size_average: Any = None,  # noqa: ANN401
    ignore_index: int = -100,
    reduce: Any = None,  # noqa: ANN401
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # noqa: ANN401
    """The fused loss, in the graph; None where the real logits are needed."""
    dim = input.dim()
    if (
        size_average is not None
        or reduce is not None
        or not isinstance(target, Tensor)
        or target.dtype != torch.int64
        or target.dim() != dim - 1
        or input.classes != (1 if dim > 1 else 0)
        or target.device != input.device
    ):
        return None
    before, after, capped = 1.0, 1.0, False
    over_before, over_after = 1.0, 1.0
    for name, value in input.steps:
        if name == "tanh":
            capped = True
        elif name == "mul":
            before, after = (before, after * value) if capped else (before * value, after)
        elif name == "div":
            over_before, over_after = (over_before, over_after * value) if capped else (over_before * value, over_after)
    softcap = after / over_after if capped else 0.0
    if capped and softcap <= 0:
        return None
    module, raw = input.head.module, input.raw
    bias = module.bias
    loss = registry.get("fused_linear_cross_entropy")(
        input.rows.to(raw),
        module.weight.to(raw),
        target,
        None if bias is None else bias.to(raw),
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        scale=(before * after) / (over_before * over_after),
    )
    autocast = torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64
    return loss if autocast else loss.to(input.dtype)
