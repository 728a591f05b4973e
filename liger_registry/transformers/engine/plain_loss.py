"""The loss of models whose logits are computed: the operation in place of PyTorch's, inside ``loss_function`` alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from liger_registry.handle import PLAIN
from liger_registry.transformers._handles import call as call_op
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.rebuild import global_names
from liger_registry.transformers.engine.report import Row

CROSS_ENTROPY = "cross_entropy"
_ATTRIBUTE = "_loss_function"  # where transformers' property keeps a loss that was set on the instance
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LossFunction:
    """A model's loss function, with the operation where it calls ``torch.nn.functional.cross_entropy``.

    Args:
        original: the function, called with exactly what this is.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """What the original gives."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # a compiler fuses PyTorch's own with what is around it
        with _CrossEntropy():
            return self.original(*args, **kwargs)


class _CrossEntropy(TorchFunctionMode):
    """Within it ``torch.nn.functional.cross_entropy`` is the operation, in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is F.cross_entropy:
            found = cross_entropy(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def cross_entropy(
    input: Any,  # noqa: ANN401 - the names of torch.nn.functional.cross_entropy
    target: Any,  # noqa: ANN401
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``torch.nn.functional.cross_entropy`` by the operation; None for what that does not take."""
    classes = 1 if isinstance(input, Tensor) and input.dim() > 1 else 0
    if (
        type(input) not in PLAIN
        or type(target) not in PLAIN
        or input.dtype not in _DTYPES
        or input.dim() == 0
        or target.dtype != torch.int64
        or target.device != input.device
        or target.shape != (*input.shape[:classes], *input.shape[classes + 1 :])
        or not (weight is None or (weight.dtype == input.dtype and weight.device == input.device))
        or size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum", "none")
        or not 0.0 <= label_smoothing <= 1.0
    ):
        return None
    loss: Tensor = call_op(
        CROSS_ENTROPY,
        input.movedim(classes, -1),
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    autocast = torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64
    return loss if autocast else loss.to(input.dtype)


def find_losses(owners: Sequence[Any], names: Mapping[int, str]) -> list[Binding | Row]:
    """The loss functions of models that have an output head.

    Args:
        owners: the models.
        names: the path of each by its id.
    """
    found: list[Binding | Row] = []
    for owner in owners:
        name, kind = names.get(id(owner), ""), type(owner)
        if not isinstance(inspect.getattr_static(kind, "loss_function", None), property):
            found.append(Row(CROSS_ENTROPY, name, False, "it has no loss_function", kind.__name__))
        elif not code_names(kind.forward, "loss_function"):
            reason = "its forward does not compute its loss by loss_function"
            found.append(Row(CROSS_ENTROPY, name, False, reason, kind.__name__))
        else:
            how = "the cross-entropy inside loss_function"
            found.append(Binding(CROSS_ENTROPY, name, owner, _ATTRIBUTE, LossFunction(owner.loss_function), how))
    return found


def code_names(function: Callable[..., Any], name: str) -> bool:
    """Whether the code of a function, below its decorators, or of one inside of it, names something so."""
    inner = inspect.unwrap(function)
    return isinstance(inner, FunctionType) and name in global_names(inner)
