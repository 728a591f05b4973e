"""The functional forms, with the signatures of ``liger_kernel.transformers.functional`` 0.8.5.

``in_place`` is accepted and concerns memory alone: no form writes into a tensor of its caller. What else is not
honoured raises ``UnsupportedOptionError``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from liger_registry.errors import InvalidInputError, UnsupportedOptionError
from liger_registry.transformers import _losses, _rotary
from liger_registry.transformers._arguments import accumulation, refuse
from liger_registry.transformers._handles import call
from liger_registry.transformers._losses import CrossEntropyOutput as CrossEntropyOutput

Tensor = torch.Tensor

_LEGACY = "torch has deprecated it, and reduction says the same"


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """Root-mean-square normalisation, in the dtype of X.

    Args:
        X: (..., hidden), floating.
        W: (hidden,), or None.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting_mode: ``llama``, ``gemma`` or ``none``, the roundings.
        in_place: without effect on results.
    """
    # Models whose weight is wider than x get the weight's dtype; liger-kernel's always that of x.
    y: Tensor = call("rms_norm", X, W, eps, offset, casting_mode)
    return y.to(X.dtype)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """``(y, X + R)`` with y the root-mean-square normalisation of the sum, both in the dtype of X.

    Args:
        X: (..., hidden), floating.
        R: of the shape of X, the residual.
        W: (hidden,), or None.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting_mode: ``llama``, ``gemma`` or ``none``, the roundings.
        in_place: without effect on results.
    """
    y, residual = call("fused_add_rms_norm", X, R, W, eps, offset, casting_mode)
    return y.to(X.dtype), residual.to(X.dtype)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation over the last dimension: X (..., hidden), W and B (hidden,) or None."""
    y: Tensor = call("layer_norm", X, W, B, eps)
    return y


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor | None,
    affine_shifting_bias: Tensor | None,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    """Normalisation over groups of channels.

    Args:
        X: (batch, channels, ...), of at least three dimensions.
        affine_scaling_weight: (channels,), or None.
        affine_shifting_bias: (channels,), or None.
        num_channels: those of X.
        num_groups: how many groups they are in.
        eps: added to the variance.

    Raises:
        InvalidInputError: another number of channels, or fewer dimensions.
    """
    if X.dim() < 3 or X.shape[1] != num_channels:
        raise InvalidInputError(
            f"X of liger_group_norm has shape {tuple(X.shape)}",
            why=f"it must be (batch, {num_channels}, ...) of at least three dimensions",
            fix="pass num_channels=X.shape[1], and X of shape (batch, channels, positions)",
        )
    y: Tensor = call("group_norm", X, affine_scaling_weight, affine_shifting_bias, groups=num_groups, eps=eps)
    return y


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``; a and b (..., width)."""
    y: Tensor = call("swiglu", a, b)
    return y


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b`` with the tanh approximation; a and b (..., width)."""
    y: Tensor = call("geglu", a, b, approximate="tanh")
    return y


def liger_relu_squared(x: Tensor) -> Tensor:
    """The square of the positive part, of any shape."""
    y: Tensor = call("relu_squared", x)
    return y


def liger_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension."""
    y: Tensor = call("softmax", x)
    return y


def liger_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys in halves, as of Llama; the results have the dtype of q.

    Args:
        q: (batch, heads, tokens, head_dim), or (batch, tokens, heads, head_dim) with ``unsqueeze_dim=2``.
        k: the same with another number of heads.
        cos: (tokens, columns), (1 or batch, tokens, columns), or the latter with a dimension of 1 at
            ``unsqueeze_dim``: rows of the tokens' positions.
        sin: like cos.
        position_ids: (batch, tokens), with tables (positions, columns): the rows to take. liger-kernel ignores it; here
            other tables raise.
        unsqueeze_dim: 1 or 2, where tables lack the dimension of heads.
        rotary_dim: how many leading columns of each head are turned, by default those of the tables. Tables that have
            other columns are read as one a pair.

    Raises:
        UnsupportedOptionError: an option that contradicts the tables.
        InvalidInputError: tables that do not fit.
    """
    return _rotary.rotated("liger_rope", q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding by three axes, as of Qwen2-VL.

    Args:
        q: (batch, heads, tokens, head_dim), or (batch, tokens, heads, head_dim) with ``unsqueeze_dim=2``.
        k: the same with another number of heads.
        cos: (3, batch, tokens, head_dim), for time, height and width.
        sin: like cos.
        mrope_section: how many pairs each axis turns.
        unsqueeze_dim: 1 or 2.
    """
    return _rotary.multimodal("liger_qwen2vl_mrope", q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross-entropy of logits (..., vocab) against class indices (...), which leaves the logits as they are.

    See ``LigerCrossEntropyLoss``; ``size_average`` and ``reduce`` raise unless they are None.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        refuse("liger_cross_entropy", name, value, _LEGACY, "pass reduction='mean', 'sum' or 'none'")
    return _losses.cross_entropy(
        "liger_cross_entropy",
        input,
        target,
        weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    )


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
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
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Cross-entropy of a linear output head, without its logits; see ``LigerFusedLinearCrossEntropyLoss``.

    Args:
        input: (..., hidden), floating.
        weight: (vocab, hidden), of the same dtype.
        target: (...), int64.
        bias: (vocab,), or None.
        ce_weight: (vocab,), the weights of the classes, or None.
        ignore_index: the target of tokens that do not count.
        lse_square_scale: the factor of the squared logsumexp.
        label_smoothing: the share of the uniform distribution.
        reduction: ``mean``, ``sum`` or ``none``.
        softcap: caps the logits by a tanh.
        return_z_loss: whether the squared logsumexp's part is returned.
        accum_dtype: what the head's gradient is summed in over slabs: float32, the dtype of ``input``, or by default
            the latter over at most four slabs, which in bf16 rounds up to four times: typically 1.6, at most 1.9 times
            the error of one product was measured. Summed in float32 the error is that of one product.
        use_token_scaling: each token's loss times its probability, through which no gradient flows.
        return_token_accuracy: whether the share of right predictions is returned.
        return_predicted_tokens: whether the predictions are.
        chunk_mem_const: 1; memory is a budget here.

    Raises:
        UnsupportedOptionError: an option's value that is not supported.
    """
    if chunk_mem_const != 1:
        raise UnsupportedOptionError(
            f"chunk_mem_const of liger_fused_linear_cross_entropy cannot be {chunk_mem_const!r}",
            why="how many logits are held at a time follows from a budget in bytes",
            fix="set LIGER_MEMORY_BUDGET, or call registry.get('fused_linear_cross_entropy', memory_budget=...)",
        )
    return _losses.fused_linear_cross_entropy(
        "liger_fused_linear_cross_entropy",
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
    )


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalised Jensen-Shannon divergence, averaged over rows that count; see ``LigerJSD``."""
    loss: Tensor = call("jsd", input, target, shift_labels, beta=beta, ignore_index=ignore_index, reduction="batchmean")
    return loss


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """Kullback-Leibler divergence, as ``torch.nn.functional.kl_div`` in fp32 (float64 inputs: float64).

    Args:
        input: (rows, vocab), log-probabilities.
        target: (rows, vocab), probabilities, or log-probabilities with ``log_target``.
        size_average: True; torch has deprecated it.
        reduce: True; torch has deprecated it.
        reduction: ``none``, ``sum``, ``mean`` or ``batchmean``.
        log_target: the target is in log space.
        eps: the floor of a probability in its logarithm.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        refuse("liger_kl_div", name, None if value in (True, None) else value, _LEGACY, "pass reduction alone")
    loss: Tensor = call("kl_div", input, target, reduction=reduction, log_target=log_target, eps=eps)
    return loss


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Total variation distance in fp32 (float64 inputs: float64); see ``LigerTVDLoss``."""
    loss: Tensor = call("tvd", input, target, shift_labels, reduction=reduction, ignore_index=ignore_index)
    return loss


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Jensen-Shannon divergence of two linear output heads, without their logits; see ``LigerFusedLinearJSD``."""
    loss: Tensor = call(
        "fused_linear_jsd",
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
        beta=jsd_beta,
        ignore_index=ignore_index,
        temperature=temperature,
        accumulate=accumulation("liger_fused_linear_jsd", accum_dtype, student_input),
    )
    return loss
