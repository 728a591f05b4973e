"""The cross-entropy of a linear output head as a module."""

from __future__ import annotations

import torch

from liger_registry.transformers import _losses
from liger_registry.transformers._arguments import check_choice, check_loss
from liger_registry.transformers.functional import CrossEntropyOutput as CrossEntropyOutput

Tensor = torch.Tensor


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Cross-entropy of a linear output head, without (tokens, vocab) of logits; loss in fp32 (float64: float64).

    Args:
        ce_weight: (vocab,), the weights of the classes, or None. It moves with the module, and is not in its state.
        ignore_index: the target of tokens that do not count.
        lse_square_scale: the factor of the squared logsumexp, which is added.
        label_smoothing: the share of the uniform distribution, 0 to 1.
        reduction: ``mean``, ``sum`` or ``none``.
        softcap: caps the logits to ``softcap * tanh(logits / softcap)``; None for no cap.
        return_z_loss: whether the squared logsumexp's part is returned.
        accum_dtype: what the head's gradient is summed in over slabs: float32, the dtype of the products, or by default
            the latter over at most four slabs, which in bf16 rounds up to four times: typically 1.6, at most 1.9 times
            the error of one product was measured. Summed in float32 the error is that of one product.
        use_token_scaling: each token's loss times its probability, through which no gradient flows.
        return_token_accuracy: whether the share of right predictions is returned.
        return_predicted_tokens: whether the predictions are.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    ce_weight: Tensor | None

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_loss(face, label_smoothing, reduction, softcap)
        check_choice(face, "use_token_scaling", use_token_scaling, (False, True))
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """The loss; with more that is asked for, all by name.

        Args:
            lin_weight: (vocab, hidden), the head's.
            _input: (..., hidden), what it is applied to.
            target: (...), int64.
            bias: (vocab,), or None.
        """
        return _losses.fused_linear_cross_entropy(
            type(self).__name__,
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )
