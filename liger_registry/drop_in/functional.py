"""The forms of ``liger_kernel.functional``, whose names are those of the operations.

``impl``, ``backend`` and ``mode`` choose one of liger-kernel's implementations; here they raise unless they are None.
"""

from __future__ import annotations

import torch

from liger_registry.drop_in import functions
from liger_registry.drop_in.functions import Parts, _refused
from liger_registry.transformers import functional

Tensor = torch.Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    row_mode: bool | None = None,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """``liger_rms_norm``; ``in_place`` and ``row_mode`` are without effect on results."""
    _refused("rms_norm", impl=impl, mode=mode, backend=backend)
    return functional.liger_rms_norm(x, weight, eps, offset, casting_mode, in_place)


def fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``liger_fused_add_rms_norm``."""
    _refused("fused_add_rms_norm", impl=impl, mode=mode, backend=backend)
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode, in_place)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """``liger_layer_norm``."""
    _refused("layer_norm", impl=impl, mode=mode, backend=backend)
    return functional.liger_layer_norm(x, weight, bias, eps)


def softmax(x: Tensor, *, impl: str | None = None, mode: str | None = None, backend: str | None = None) -> Tensor:
    """``liger_softmax``."""
    _refused("softmax", impl=impl, mode=mode, backend=backend)
    return functional.liger_softmax(x)


def swiglu(
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """``silu(a * gate_multiplier) * b * down_multiplier``."""
    _refused("swiglu", impl=impl, mode=mode, backend=backend)
    return functions.LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


def geglu(
    a: Tensor, b: Tensor, *, impl: str | None = None, mode: str | None = None, backend: str | None = None
) -> Tensor:
    """``liger_geglu``."""
    _refused("geglu", impl=impl, mode=mode, backend=backend)
    return functional.liger_geglu(a, b)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``liger_rope``."""
    _refused("rope", impl=impl, mode=mode, backend=backend)
    return functional.liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Parts:
    """``(loss, z_loss, token_accuracy, predicted_tokens)``, None for what is not asked for."""
    _refused("cross_entropy", impl=impl, mode=mode, backend=backend)
    return functions.LigerCrossEntropyFunction.apply(
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


def fused_linear_cross_entropy(
    _input: Tensor,
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
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Parts:
    """``(loss, z_loss, token_accuracy, predicted_tokens)``, None for what is not asked for."""
    _refused("fused_linear_cross_entropy", impl=impl, mode=mode, backend=backend)
    return functions.LigerFusedLinearCrossEntropyFunction.apply(
        _input,
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


def jsd(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """``liger_jsd``."""
    _refused("jsd", impl=impl, mode=mode, backend=backend)
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


def kl_div(
    y_pred: Tensor,
    y_true: Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """``liger_kl_div`` with another default."""
    _refused("kl_div", impl=impl, mode=mode, backend=backend)
    return functions.LigerKLDivLossFunction.apply(y_pred, y_true, reduction, log_target, eps)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """``liger_fused_linear_jsd``."""
    _refused("fused_linear_jsd", impl=impl, mode=mode, backend=backend)
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature
    )
