"""Cross-entropy as a module."""

from __future__ import annotations

import torch

from liger_registry.transformers import _losses
from liger_registry.transformers._arguments import check_loss
from liger_registry.transformers.functional import CrossEntropyOutput as CrossEntropyOutput

Tensor = torch.Tensor


class LigerCrossEntropyLoss(torch.nn.Module):
    """Cross-entropy of logits against class indices, in the place of ``torch.nn.CrossEntropyLoss``.

    The logits are left as they are. To let backward write their gradient over them, as liger-kernel does, call
    ``registry.get("cross_entropy")(logits, target, in_place=True)``.

    Args:
        weight: (vocab,), the weights of the classes, or None. It moves with the module, and is not in its state.
        ignore_index: the target of rows that do not count.
        lse_square_scale: the factor of the squared logsumexp, which is added.
        label_smoothing: the share of the uniform distribution, 0 to 1.
        reduction: ``mean``, ``sum`` or ``none``.
        softcap: caps the logits to ``softcap * tanh(logits / softcap)``; None for no cap.
        return_z_loss: whether the squared logsumexp's part is returned.
        return_token_accuracy: whether the share of right predictions is.
        return_predicted_tokens: whether the predictions are.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        check_loss(type(self).__name__, label_smoothing, reduction, softcap)
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """The loss of logits (..., vocab) and targets (...), int64; with more that is asked for, all by name."""
        return _losses.cross_entropy(
            type(self).__name__,
            _input,
            target,
            self.weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )
