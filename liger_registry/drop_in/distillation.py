"""A base of distillation losses written as autograd functions; the engine's own way is ``LinearDistillationLoss``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """Gradients in forward, some rows at a time, of a loss that a subclass has as ``distillation_loss_fn``.

    A subclass calls this forward from its own, with ``cls`` and ``ctx``, and takes the first values of this backward.
    """

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int, **settings: Any
    ) -> Tensor:
        """The sum over rows that count, 0-dim; a subclass has it.

        Args:
            student_logits: (rows, vocab), divided by the temperature.
            teacher_logits: the same.
            target: (rows,).
            ignore_index: the target of rows that do not count.
            **settings: what forward was called with beyond its own arguments, and beta.
        """
        raise NotImplementedError("a subclass of LigerFusedLinearDistillationBase has a distillation_loss_fn")

    @staticmethod
    def forward(
        cls: type[LigerFusedLinearDistillationBase],
        ctx: Any,  # noqa: ANN401
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        chunk_size: int = 1024,
        ignore_index: int = -100,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        compute_ce_loss: bool = True,
        temperature: float = 1.0,
        compiled: bool = True,
        return_soft_hard_loss: bool = False,
        **loss_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The loss, fp32 and 0-dim, or ``(loss, soft, hard)``.

        Args:
            cls: the subclass.
            ctx: that of its forward.
            student_input: (rows, hidden).
            student_weight: (vocab, hidden).
            teacher_input: (rows, any width).
            teacher_weight: (vocab or more, that width); logits that the student has not are 0.
            target: (rows,), int64.
            student_bias: (vocab,), or None.
            teacher_bias: (vocab or more,), or None.
            chunk_size: how many rows at a time.
            ignore_index: the target of rows that do not count.
            weight_hard_loss: the factor of the student's cross-entropy, a mean over rows that count.
            weight_soft_loss: that of the subclass's loss, likewise.
            beta: for the subclass's loss.
            compute_ce_loss: False leaves the cross-entropy out.
            temperature: what logits are divided by for the subclass's loss.
            compiled: without effect.
            return_soft_hard_loss: whether both parts are returned too.
            **loss_kwargs: for the subclass's loss.
        """
        count = (target != ignore_index).sum().clamp_min(1)
        wanted = [student_input, student_weight] + ([] if student_bias is None else [student_bias])
        hidden_grad = torch.empty_like(student_input)
        sums = [torch.zeros_like(t) for t in wanted[1:]]
        losses = torch.zeros(2, device=student_input.device)
        for start in range(0, student_input.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (student_input[rows], *wanted[1:])]
                logits = functional.linear(*leaves)
                teacher = functional.linear(
                    teacher_input[rows].detach(),
                    teacher_weight.detach(),
                    None if teacher_bias is None else teacher_bias.detach(),
                )
                padded = functional.pad(logits, (0, teacher.shape[-1] - logits.shape[-1]))
                soft = cls.distillation_loss_fn(
                    padded / temperature,
                    teacher / temperature,
                    target=target[rows],
                    ignore_index=ignore_index,
                    beta=beta,
                    **loss_kwargs,
                )
                hard = torch.zeros_like(losses[0])
                if compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss):
                    hard = functional.cross_entropy(
                        logits.float(), target[rows], reduction="sum", ignore_index=ignore_index
                    )
                soft, hard = soft.float() / count, hard / count
                grads = torch.autograd.grad(weight_soft_loss * soft + weight_hard_loss * hard, leaves)
            hidden_grad[rows] = grads[0]
            for total, grad in zip(sums, grads[1:], strict=True):
                total += grad
            losses += torch.stack([soft.detach(), hard.detach()])
        ctx.save_for_backward(hidden_grad, sums[0], sums[1] if len(sums) > 1 else None)
        soft_loss, hard_loss = losses.unbind()
        loss = weight_soft_loss * soft_loss + weight_hard_loss * hard_loss
        return (loss, soft_loss, hard_loss) if return_soft_hard_loss else loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of forward's first six tensors: the student's input and weight, three None, the student's bias."""
        hidden, weight, bias = (None if t is None else t * grad_output.to(t.dtype) for t in ctx.saved_tensors)
        return hidden, weight, None, None, None, bias
