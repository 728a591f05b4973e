"""The functional forms, with the arguments and defaults of ``liger_kernel.chunked_loss.functional`` 0.8.5.

Those of liger-kernel take arguments by position alone; these also by name. Their defaults differ in places from those
of the classes, as liger-kernel's do. ``compiled`` and ``chunk_size`` have no effect on results.
"""

from __future__ import annotations

import torch
from torch import nn

from liger_registry.chunked_loss._checks import check_chunking
from liger_registry.chunked_loss.cpo_loss import cpo_loss
from liger_registry.chunked_loss.distillation import cosine_similarity, distillation_loss, jensen_shannon
from liger_registry.chunked_loss.dpo_loss import dpo_loss
from liger_registry.chunked_loss.grpo import Policy
from liger_registry.chunked_loss.head import PLAIN, Head
from liger_registry.chunked_loss.kto import kto_loss
from liger_registry.chunked_loss.orpo_loss import orpo_loss
from liger_registry.chunked_loss.policy import policy_loss
from liger_registry.chunked_loss.preference import Result
from liger_registry.chunked_loss.simpo_loss import simpo_loss

Tensor = torch.Tensor
Weight = Tensor | nn.Module


def liger_fused_linear_dpo(
    _input: Tensor,
    weight: Weight,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
    *,
    ref_logps: Tensor | None = None,
    head: Head = PLAIN,
) -> Result:
    """``(loss, metrics)`` as ``LigerFusedLinearDPOLoss`` gives them."""
    check_chunking("liger_fused_linear_dpo", compiled, chunk_size)
    return dpo_loss(
        "liger_fused_linear_dpo",
        weight,
        _input,
        target,
        bias,
        ref_input,
        ref_weight,
        ref_bias,
        ref_logps=ref_logps,
        ignore_index=ignore_index,
        beta=beta,
        compute_nll_loss=compute_nll_loss,
        use_ref_model=use_ref_model,
        average_log_prob=average_log_prob,
        loss_type=loss_type,
        label_smoothing=label_smoothing,
        discopop_tau=discopop_tau,
        alpha=alpha,
        head=head,
    )


def liger_fused_linear_orpo(
    _input: Tensor,
    weight: Weight,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: Tensor | None = None,
    compiled: bool = True,
    chunk_size: int = 1,
    *,
    head: Head = PLAIN,
) -> Result:
    """``(loss, metrics)`` as ``LigerFusedLinearORPOLoss`` gives them."""
    check_chunking("liger_fused_linear_orpo", compiled, chunk_size)
    return orpo_loss(
        "liger_fused_linear_orpo",
        weight,
        _input,
        target,
        bias,
        nll_target,
        ignore_index=ignore_index,
        beta=beta,
        compute_nll_loss=compute_nll_loss,
        head=head,
    )


def liger_fused_linear_cpo(
    _input: Tensor,
    weight: Weight,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    compiled: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    *,
    head: Head = PLAIN,
) -> Result:
    """``(loss, metrics)`` as ``LigerFusedLinearCPOLoss`` gives them."""
    check_chunking("liger_fused_linear_cpo", compiled, chunk_size)
    return cpo_loss(
        "liger_fused_linear_cpo",
        weight,
        _input,
        target,
        bias,
        ignore_index=ignore_index,
        beta=beta,
        alpha=alpha,
        label_smoothing=label_smoothing,
        compute_nll_loss=compute_nll_loss,
        average_log_prob=average_log_prob,
        head=head,
    )


def liger_fused_linear_simpo(
    _input: Tensor,
    weight: Weight,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    gamma: float = 0.5,
    chunk_size: int = 1,
    *,
    head: Head = PLAIN,
) -> Result:
    """``(loss, metrics)`` as ``LigerFusedLinearSimPOLoss`` gives them."""
    check_chunking("liger_fused_linear_simpo", compiled, chunk_size)
    return simpo_loss(
        "liger_fused_linear_simpo",
        weight,
        _input,
        target,
        bias,
        ignore_index=ignore_index,
        beta=beta,
        alpha=alpha,
        label_smoothing=label_smoothing,
        compute_nll_loss=compute_nll_loss,
        gamma=gamma,
        head=head,
    )


def liger_fused_linear_kto(
    _input: Tensor,
    weight: Weight,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    *,
    ref_logps: Tensor | None = None,
    head: Head = PLAIN,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``(loss, metrics)`` as ``LigerFusedLinearKTOLoss`` gives them."""
    check_chunking("liger_fused_linear_kto", compiled, chunk_size)
    return kto_loss(
        "liger_fused_linear_kto",
        weight,
        _input,
        target,
        bias,
        preference_labels,
        ref_input,
        ref_weight,
        ref_bias,
        kl,
        ref_logps=ref_logps,
        ignore_index=ignore_index,
        beta=beta,
        use_ref_model=use_ref_model,
        average_log_prob=average_log_prob,
        head=head,
    )


def liger_fused_linear_grpo(
    _input: Tensor,
    weight: Weight,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    compiled: bool = True,
    use_ref_model: bool = True,
    chunk_size: int = 1,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    num_items_in_batch: Tensor | int | float | None = None,
    *,
    head: Head = PLAIN,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``(loss, metrics)`` as ``LigerFusedLinearGRPOLoss`` gives them."""
    check_chunking("liger_fused_linear_grpo", compiled, chunk_size)
    policy = Policy(
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        beta=beta,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        delta=delta,
        use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )
    return policy_loss(
        "liger_fused_linear_grpo",
        policy,
        _input,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias,
        ref_per_token_logps,
        old_per_token_logps,
        ref_input,
        ref_weight,
        ref_bias,
        vllm_is_ratio=vllm_is_ratio,
        num_items_in_batch=num_items_in_batch,
        max_completion_length=max_completion_length,
        use_ref_model=use_ref_model,
        temperature=temperature,
        head=head,
    )


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Weight,
    teacher_input: Tensor,
    teacher_weight: Weight,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
    *,
    head: Head = PLAIN,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The loss, or ``(loss, soft, hard)``, as ``LigerFusedLinearJSDLoss`` gives them."""
    check_chunking("liger_fused_linear_jsd", compiled, chunk_size)
    return distillation_loss(
        "liger_fused_linear_jsd",
        jensen_shannon(beta),
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias,
        teacher_bias,
        weight_hard_loss=weight_hard_loss,
        weight_soft_loss=weight_soft_loss,
        ignore_index=ignore_index,
        temperature=temperature,
        return_soft_hard_loss=return_soft_hard_loss,
        head=head,
    )


def liger_fused_linear_cosine(
    student_input: Tensor,
    student_weight: Weight,
    teacher_input: Tensor,
    teacher_weight: Weight,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
    *,
    head: Head = PLAIN,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The loss, or ``(loss, soft, hard)``, as ``LigerFusedLinearCosineSimilarityLoss`` gives them."""
    check_chunking("liger_fused_linear_cosine", compiled, chunk_size)
    return distillation_loss(
        "liger_fused_linear_cosine",
        cosine_similarity(beta, temperature),
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias,
        teacher_bias,
        weight_hard_loss=weight_hard_loss,
        weight_soft_loss=weight_soft_loss,
        ignore_index=ignore_index,
        temperature=temperature,
        return_soft_hard_loss=return_soft_hard_loss,
        head=head,
    )
