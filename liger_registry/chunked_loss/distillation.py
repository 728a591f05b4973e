"""Distillation losses over two output heads, and the way to one's own.

A loss is a function of rows of student's and teacher's logits, which it is given a slab at a time::

    import torch
    from liger_registry.chunked_loss import LinearDistillationLoss

    def squares(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return (student - teacher).square().mean(-1)

    loss_function = LinearDistillationLoss(squares, weight_hard_loss=0.0, weight_soft_loss=1.0)
    loss = loss_function(hidden, head.weight, teacher_hidden, teacher_head.weight, labels)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss._checks import at_least_zero, check_flags, check_number, number, positive
from liger_registry.chunked_loss.distilled import by_operator, outside, text_of
from liger_registry.chunked_loss.divergence import Cosine, Differentiated, Divergence, JensenShannon
from liger_registry.chunked_loss.engine import fixed
from liger_registry.chunked_loss.head import PLAIN, Head, applied
from liger_registry.chunked_loss.slabs import Job, distilled
from liger_registry.errors import InvalidInputError
from liger_registry.ops.jsd import check_beta
from liger_registry.runtime import registry

Tensor = torch.Tensor
Found = Tensor | tuple[Tensor, Tensor, Tensor]


def jensen_shannon(beta: float) -> Divergence:
    """The generalised Jensen-Shannon divergence with the teacher's share beta.

    Raises:
        UnsupportedOptionError: a beta that is no share.
    """
    check_number("jensen_shannon", "beta", beta, at_least_zero, "it is a share, from 0 to 1", "pass 0.5")
    check_beta("jensen_shannon", beta)
    return JensenShannon(float(beta))


def cosine_similarity(beta: float, temperature: float = 1.0) -> Divergence:
    """``beta * (1 - cos)`` of the angle between rows of logits.

    Raises:
        UnsupportedOptionError: a temperature, which angles do not depend on.
    """
    check_number(
        "cosine_similarity",
        "temperature",
        temperature,
        lambda value: value == 1,
        "the angle between two rows of logits does not depend on it",
        "leave it at 1.0",
    )
    check_number("cosine_similarity", "beta", beta, number, "it is a factor", "pass 0.5")
    return Cosine(float(beta))


def check(face: str, temperature: float, weight_hard_loss: float, weight_soft_loss: float, flag: object) -> None:
    """Raise UnsupportedOptionError if a loss cannot be made with these."""
    check_number(face, "temperature", temperature, positive, "logits are divided by it", "pass 1.0")
    for name, value in (("weight_hard_loss", weight_hard_loss), ("weight_soft_loss", weight_soft_loss)):
        check_number(face, name, value, number, "a loss is multiplied by it", "pass 0.5")
    check_flags(face, return_soft_hard_loss=flag)


def distillation_loss(
    face: str,
    divergence: Divergence,
    student_input: Tensor,
    student_weight: Tensor | nn.Module,
    teacher_input: Tensor,
    teacher_weight: Tensor | nn.Module,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    return_soft_hard_loss: bool = False,
    head: Head = PLAIN,
) -> Found:
    """The loss, or ``(loss, soft, hard)``; arguments as of ``LinearDistillationLoss``."""
    check(face, temperature, weight_hard_loss, weight_soft_loss, return_soft_hard_loss)
    student_input, student_weight, student_bias = applied(face, student_input, student_weight, student_bias)
    teacher_input, teacher_weight, teacher_bias = applied(face, teacher_input, teacher_weight, teacher_bias)
    _check_shapes(face, student_input, student_weight, teacher_input, teacher_weight, true_labels)
    tensors = _cast(student_input, student_weight, student_bias, teacher_input, teacher_weight, teacher_bias)
    hard = weight_hard_loss != 0 or return_soft_hard_loss
    soft = weight_soft_loss != 0 or return_soft_hard_loss
    plain = student_bias is None and teacher_bias is None and student_weight.shape[0] == teacher_weight.shape[0]
    alone = isinstance(divergence, JensenShannon) and not hard and head.softcap is None and head.logit_scale > 0
    with torch.autocast(student_input.device.type, enabled=False):
        if plain and alone and isinstance(divergence, JensenShannon):
            states, weight, _, others, other_weight, _ = tensors
            operation = registry.get("fused_linear_jsd", memory_budget=head.memory_budget)
            found: Tensor = operation(
                states,
                weight,
                others,
                other_weight,
                true_labels,
                beta=divergence.beta,
                ignore_index=ignore_index,
                temperature=temperature * head.temperature / head.logit_scale,
                compact=head.compact,
            )
            return found if weight_soft_loss == 1 else weight_soft_loss * found
        job = Job(
            divergence if soft else None, hard, weight_soft_loss, weight_hard_loss, ignore_index, temperature, head
        )
        rows = [t.reshape(-1, t.shape[-1]) if n in (0, 3) and t is not None else t for n, t in enumerate(tensors)]
        loss, soft_loss, hard_loss = _distilled(job, *rows, true_labels.reshape(-1))
    return (loss, soft_loss, hard_loss) if return_soft_hard_loss else loss


def _distilled(job: Job, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The losses; in a compiled graph by one operator, unless the function is none that can be imported by its name."""
    if not torch.compiler.is_compiling():
        return distilled(job, *tensors)
    kind, head = job.divergence, job.head
    text = text_of(
        None if kind is None else type(kind),
        fixed(kind.beta) if isinstance(kind, (JensenShannon, Cosine)) else None,
        kind.function if isinstance(kind, Differentiated) else None,
        fixed(kind.settings) if isinstance(kind, Differentiated) else None,
        fixed([head.softcap, head.logit_scale, head.temperature, head.compact, head.memory_budget]),
        fixed([job.hard, job.weight_soft, job.weight_hard, job.ignore_index, job.temperature]),
    )
    return outside[0](job, *tensors) if text is None else by_operator(text, *tensors)


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as autocast would cast those of a linear layer."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _check_shapes(
    face: str,
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
) -> None:
    """Raise InvalidInputError if student, teacher and labels do not go together."""
    for name, states, weight in (
        ("student", student_input, student_weight),
        ("teacher", teacher_input, teacher_weight),
    ):
        if weight.dim() != 2 or states.dim() == 0 or states.shape[-1] != weight.shape[1]:
            raise InvalidInputError(
                f"{name}_weight of {face} has shape {tuple(weight.shape)}, {name}_input {tuple(states.shape)}",
                why="the weight must have shape (vocab, hidden), and its input (..., hidden)",
                fix="pass the weight of the output head, as of torch.nn.Linear",
            )
    if student_input.shape[:-1] != teacher_input.shape[:-1] or true_labels.shape != student_input.shape[:-1]:
        raise InvalidInputError(
            f"student, teacher and labels of {face} have rows {tuple(student_input.shape[:-1])}, "
            f"{tuple(teacher_input.shape[:-1])} and {tuple(true_labels.shape)}",
            why="they are compared row by row",
            fix="pass the same positions of all three",
        )
    if student_weight.shape[0] > teacher_weight.shape[0]:
        raise InvalidInputError(
            f"the student of {face} has a vocabulary of {student_weight.shape[0]}, the teacher of "
            f"{teacher_weight.shape[0]}",
            why="the teacher has nothing to say on some of the student's tokens",
            fix="pad the teacher's weight to the student's vocabulary",
        )


class Distillation(nn.Module):
    """What distillation losses over two output heads have in common.

    Args:
        weight_hard_loss: the factor of the student's cross-entropy, a mean over rows.
        weight_soft_loss: that of the divergence's mean.
        ignore_index: the label of rows that do not count.
        temperature: what logits are divided by before the divergence.
        return_soft_hard_loss: whether both losses are returned too.
        head: how logits are made, of both heads.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        weight_hard_loss: float,
        weight_soft_loss: float,
        ignore_index: int,
        temperature: float,
        return_soft_hard_loss: bool,
        head: Head,
    ) -> None:
        super().__init__()
        check(type(self).__name__, temperature, weight_hard_loss, weight_soft_loss, return_soft_hard_loss)
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.return_soft_hard_loss = return_soft_hard_loss
        self.head = head

    @property
    def divergence(self) -> Divergence:
        """The loss of rows of both heads' logits."""
        raise NotImplementedError

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor | nn.Module,
        teacher_input: Tensor,
        teacher_weight: Tensor | nn.Module,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Found:
        """The loss, 0-dim, or ``(loss, soft, hard)``; only the student gets gradients, and through the loss alone.

        Args:
            student_input: (..., hidden).
            student_weight: (vocab, hidden), the head's; or the head.
            teacher_input: (..., any width).
            teacher_weight: (vocab or more, that width), or the head. Of a larger vocabulary, which some models pad, the
                student's logits beyond its own are 0.
            true_labels: (...), int64.
            student_bias: (vocab,), or None.
            teacher_bias: (vocab or more,), or None.

        Raises:
            InvalidInputError: shapes that do not fit.
        """
        return distillation_loss(
            type(self).__name__,
            self.divergence,
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            true_labels,
            student_bias,
            teacher_bias,
            weight_hard_loss=self.weight_hard_loss,
            weight_soft_loss=self.weight_soft_loss,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            return_soft_hard_loss=self.return_soft_hard_loss,
            head=self.head,
        )


class LinearDistillationLoss(Distillation):
    """A distillation loss of a user's own over two output heads.

    Args:
        function: ``(student, teacher, **settings)`` to the losses of rows, (rows,), of logits (rows, vocab) in fp32
            (float64: float64) that were divided by the temperature. It is called with some rows at a time, under
            autograd.
        weight_hard_loss: the factor of the student's cross-entropy, a mean over rows.
        weight_soft_loss: that of the function's mean.
        ignore_index: the label of rows that do not count.
        temperature: see function.
        return_soft_hard_loss: whether both losses are returned too.
        head: how logits are made, of both heads.
        settings: keyword arguments of the function.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        return_soft_hard_loss: bool = False,
        head: Head = PLAIN,
        **settings: Any,
    ) -> None:
        super().__init__(weight_hard_loss, weight_soft_loss, ignore_index, temperature, return_soft_hard_loss, head)
        self.function = function
        self.settings = settings

    @property
    def divergence(self) -> Divergence:
        """The function, with its settings."""
        return Differentiated(self.function, self.settings)
