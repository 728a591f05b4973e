"""Group relative policy optimisation and its kin over an output head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from liger_registry.chunked_loss._checks import check_chunking, check_flags
from liger_registry.chunked_loss.grpo import NAMES, Policy
from liger_registry.chunked_loss.head import PLAIN, Head
from liger_registry.chunked_loss.policy import at_temperature, check_policy, policy_loss

Tensor = torch.Tensor


class LigerFusedLinearGRPOLoss(nn.Module):
    """Group relative policy optimisation and its kin over an output head, without (tokens, vocab) of logits.

    Its defaults are liger-kernel's: of TRL's they differ in ``beta``, 0, and ``use_bias_correction_kl``, True.

    Args:
        beta: the factor of the divergence from the reference.
        compiled: without effect; nothing is compiled by ``torch.compile``.
        use_ref_model: whether there is a reference; without one the divergence is 0.
        chunk_size: without effect; how much is computed at once is chosen by memory.
        epsilon_low: see ``grpo.Policy``.
        epsilon_high: see there; for ``cispo`` some 5.
        loss_type: one of ``grpo.LOSS_TYPES``.
        max_completion_length: the number of tokens that completions are cut off at, which ``dr_grpo`` divides by.
        importance_sampling_level: see ``grpo.Policy``.
        sapo_temperature_pos: see there.
        sapo_temperature_neg: see there.
        temperature: what logits are divided by at last.
        delta: see ``grpo.Policy``.
        use_bias_correction_kl: see there.
        vespo_k_pos: see there.
        vespo_lambda_pos: see there.
        vespo_k_neg: see there.
        vespo_lambda_neg: see there.
        head: how logits are made.

    Raises:
        UnsupportedOptionError: a value that is not supported, or that nothing would read.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        head: Head = PLAIN,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_chunking(face, compiled, chunk_size)
        check_flags(face, use_ref_model=use_ref_model)
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.chunk_size = chunk_size
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.temperature = temperature
        self.delta = delta
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos = vespo_k_pos
        self.vespo_lambda_pos = vespo_lambda_pos
        self.vespo_k_neg = vespo_k_neg
        self.vespo_lambda_neg = vespo_lambda_neg
        self.head = head
        check_policy(face, self._policy(), max_completion_length)
        at_temperature(face, head, temperature)

    def _policy(self) -> Policy:
        return Policy(**{name: getattr(self, name) for name in NAMES})

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor | nn.Module,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | nn.Module | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | int | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``(loss, metrics)``.

        Metrics are means over tokens that count, 0-dim each: of the divergence, if beta is not 0, and of whether the
        ratio was clipped.

        Args:
            _input: (sequences, tokens, hidden), of completions.
            lin_weight: (vocab, hidden), the head's; or the head.
            selected_token_ids: (sequences, tokens), int64.
            attention_mask: (sequences, tokens), the weight of tokens; those of 0 do not count.
            advantages: (sequences,), or (sequences, tokens).
            bias: (vocab,), or None.
            ref_per_token_logps: (sequences, tokens), under the reference model, in place of ``ref_input``.
            old_per_token_logps: (sequences, tokens), under the policy that sampled; None for the present one.
            ref_input: the reference model's hidden states, of any width.
            ref_weight: its head's weight, or its head.
            ref_bias: (vocab,), or None.
            vllm_is_ratio: (sequences,), (sequences, 1) or (sequences, tokens), a factor on the loss that corrects for
                who sampled the tokens.
            num_items_in_batch: for ``dapo``, ``cispo`` and ``vespo``, the tokens of the whole batch, over all
                processes; None for those of this call and of the other processes'.

        Raises:
            InvalidInputError: shapes that do not fit, or a reference that is missing.
            UnsupportedOptionError: a ``num_items_in_batch`` that nothing would read.
        """
        return policy_loss(
            type(self).__name__,
            self._policy(),
            _input,
            lin_weight,
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
            max_completion_length=self.max_completion_length,
            use_ref_model=self.use_ref_model,
            temperature=self.temperature,
            head=self.head,
        )
