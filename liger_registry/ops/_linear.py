"""What the contracts of losses over a linear head have in common: checks, example inputs, sizes of rounding errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.examples import fill
from liger_registry.op import check_dtype, dtype_name
from liger_registry.ops._logits import DTYPES, exponent, is_target, slope, split_softmax, transformed, wide
from liger_registry.problem import Problem

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor | None, ...]

#: What takes the place of options that a key knows by class alone.
SOFTCAP, SCALE, SMOOTHING, SQUARE = 30.0, 0.75, 0.1, 1e-3
COMPACT = ("auto", "on", "off")
# Examples lie on grids so coarse that a product in fp32 is exact in any order: logits are then rounded alike by every
# implementation, and what differs is a fault. Hidden states are multiples of 1/8, weights of an eighth of their size.
# Random weights and biases in float32 are finer, so that a cast to bf16 shows, though not one to TF32 of 11 bits.
GRID, FINE_GRID = 8.0, 256.0


def validate(op: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Any) -> None:  # noqa: ANN401
    """Raise if hidden, weight, target and bias of a call contradict each other; sizes may be symbolic.

    Raises:
        InvalidInputError: shapes that do not fit, an empty vocabulary or width, or a target that is not int64.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64, or several of them.
    """
    check_dtype(op, hidden, DTYPES, "hidden")
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    names = {name: dtype_name(t) for name, t in given.items() if t is not None}
    if len(set(names.values())) > 1:
        raise UnsupportedDtypeError(
            f"{op} takes hidden, weight and bias of one dtype",
            why=", ".join(f"{name} is {dtype}" for name, dtype in names.items()),
            fix="cast them to one dtype, or call it under torch.autocast",
        )
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise InvalidInputError(
            f"hidden of {op} has shape {tuple(hidden.shape)}",
            why="its last dimension must be the width of the weight, at least 1",
            fix="pass hidden of shape (..., hidden)",
        )
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise InvalidInputError(
            f"weight of {op} has shape {tuple(weight.shape)}, hidden has {tuple(hidden.shape)}",
            why=f"the weight must have shape (vocab, {hidden.shape[-1]})",
            fix="pass the weight of the output head, as of torch.nn.Linear",
        )
    if target.shape != hidden.shape[:-1] or dtype_name(target) != "int64":
        raise InvalidInputError(
            f"target of {op} is {dtype_name(target)} of shape {tuple(target.shape)}, hidden has {tuple(hidden.shape)}",
            why="there must be one int64 class a row",
            fix="pass target of shape hidden.shape[:-1], as target.long()",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInputError(
            f"bias of {op} has shape {tuple(bias.shape)}, weight has {tuple(weight.shape)}",
            why=f"the bias must have shape ({weight.shape[0]},)",
            fix="pass the bias of the output head, or None",
        )


def check_targets(op: str, target: torch.Tensor, vocab: int, ignore_index: int) -> None:
    """Raise InvalidInputError if a target is neither a class nor ignored; waits for the device."""
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if bool(wrong.any()):
        raise InvalidInputError(
            f"target of {op} holds {int(target[wrong][0])}",
            why=f"classes are 0 to {vocab - 1}, and {ignore_index} is ignored",
            fix="correct the labels, or pass their ignore_index",
        )


def head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The logits as a model's output head rounds them: summed in fp32, rounded once.

    On a CPU 16-bit operands are cast first, which gives the same roundings in forward and backward: of the latter,
    PyTorch's product in bf16 takes minutes on a processor that has none. With a bias they are cast on a GPU too: there
    cuBLASLt adds a bias vector within the product, or, where its kernel shares the sums (split-K) or cannot add one, to
    the product already rounded to 16 bits, as the shape has it. That is two roundings, and not the formula.
    """
    import torch

    linear = torch.nn.functional.linear
    if wide(hidden.dtype) == hidden.dtype or (bias is None and hidden.device.type != "cpu"):
        return linear(hidden, weight, bias)
    return linear(hidden.float(), weight.float(), None if bias is None else bias.float()).to(hidden.dtype)


def example(problem: Problem, device: torch.device | str, seed: int, style: str) -> tuple[torch.Tensor | None, ...]:
    """``(hidden, weight, target, bias)`` for a problem; on the meta device without values.

    Every eighth token is ignored, of style ``zeros`` every other one; the last one's class is the last. Tokens of the
    first quarter are sure of their class: their hidden states are near its weight.
    """
    import torch

    tokens, width, vocab = int(problem.tokens), int(problem.hidden), int(problem.vocab)
    dtype = getattr(torch, str(problem.dtypes["hidden"]))
    size = 2.0 ** -max(0, (width.bit_length() - 3) // 2)

    def on_grid(shape: tuple[int, ...], seed: int, style: str, scale: float, grid: float = GRID) -> torch.Tensor:
        values = fill(shape, torch.float32, device, seed, style)
        return values if values.is_meta else (values * grid).round_().mul_(scale / grid)

    fine = FINE_GRID if dtype.itemsize > 2 and style == "random" else GRID
    hidden, weight = on_grid((tokens, width), seed, style, 1.0), on_grid((vocab, width), seed + 1, "random", size, fine)
    bias = None if problem.dtypes["bias"] == "none" else on_grid((vocab,), seed + 2, "random", 1.0, fine)
    target = torch.empty(tokens, dtype=torch.int64, device=device)
    if not target.is_meta:
        generator = torch.Generator(device=device).manual_seed(seed + 3)
        target = torch.randint(vocab, (tokens,), generator=generator, device=device)
        target[-1:] = vocab - 1
        sure = slice(0, tokens // 4)
        hidden[sure] = (hidden[sure] + weight[target[sure]] * (2.0 / size)).mul_(GRID).round_().div_(GRID)
        if style == "zeros":
            target[::2] = -100
        target[5::8] = -100
    return hidden.to(dtype), weight.to(dtype), target, None if bias is None else bias.to(dtype)


class Sizes:
    """The sizes of what a loss over a linear head sums, in float64: what rounding errors scale with.

    Args:
        inputs: hidden, weight, target and bias, float64.
        options: with ``softcap`` and ``scale``.
    """

    def __init__(self, inputs: Tensors, options: Mapping[str, Any]) -> None:
        hidden, weight, target, bias = inputs[:4]
        assert hidden is not None
        assert weight is not None
        assert target is not None
        self.shape = target.shape
        self.rows, self.weight, self.target = hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1)
        raw = head(self.rows, weight, bias)
        self.z = transformed(raw, options["softcap"], options["scale"])
        self.log_rest, self.target_logit, self.there = split_softmax(self.z, self.target)
        _, _, self.mask = is_target(self.target, weight.shape[0])
        self.slope, steep = slope(raw, options["softcap"], options["scale"])
        #: By how much logits are off: their own rounding, and that of the products they sum.
        self.error = self.z.abs() + (self.rows.square() @ weight.square().t()).sqrt() * steep
        self.lse = self.log_rest.logaddexp(self.target_logit).where(self.there, self.log_rest)
        self.p = (self.z - self.lse[:, None]).exp()
        #: By how much a row's logsumexp is off.
        self.lse_error = 1.0 + self.lse.abs() + (self.p * self.error).sum(-1)
        finite = self.log_rest.masked_fill(self.log_rest.isinf(), 0.0)
        rest = (self.z - finite[:, None]).exp().masked_fill(self.mask, 0.0)
        #: The same of the logarithm of the other classes' sum.
        self.rest_error = 1.0 + finite.abs() + (rest * self.error).sum(-1)
        self.logit_error = self.error.masked_fill(~self.mask, 0.0).sum(-1)

    def logp(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's negative log-probability, and the size of its errors; each (tokens,)."""
        import torch

        gap = self.log_rest - self.target_logit
        value = torch.logaddexp(gap, torch.zeros_like(gap))
        return value, torch.sigmoid(gap) * (self.rest_error + self.logit_error) + value

    def gradients(
        self,
        loss: torch.Tensor,
        logsumexp: torch.Tensor,
        weighted: torch.Tensor | None = None,
        mean: Any = None,  # noqa: ANN401
    ) -> dict[str, torch.Tensor]:
        """The sizes of the gradients of hidden, weight and bias, in their shapes.

        Args:
            loss: (tokens,), the derivative by the target's negative log-probability.
            logsumexp: (tokens,), by the logsumexp.
            weighted: (tokens, vocab) or None, by the sum of ``z`` apart from these.
            mean: (tokens,) or None, by the mean of ``z`` under the softmax.
        """
        import torch

        own = torch.sigmoid(self.log_rest - self.target_logit)
        total = (loss + logsumexp).abs()[:, None]
        value = (loss + logsumexp)[:, None] * self.p
        off = exponent(self.z.masked_fill(self.z.isinf(), 0.0), self.lse) + self.error + self.lse_error[:, None]
        size = total * self.p * off
        at = (own * loss.abs() * (1.0 + self.rest_error + self.logit_error))[:, None]
        size = torch.where(self.mask, at + logsumexp.abs()[:, None] * self.p * off, size)
        value = torch.where(self.mask, (logsumexp[:, None] * self.p) - (own * loss)[:, None], value)
        if weighted is not None:
            size, value = size + weighted.abs(), value + weighted
        if mean is not None:
            centre = (self.p * self.z).sum(-1, keepdim=True)
            steps = 1.0 + self.z.abs() + centre.abs() + (self.p * self.error).sum(-1, keepdim=True)
            size = size + mean.abs()[:, None] * self.p * steps * off
            value = value + mean[:, None] * self.p * (1.0 + self.z - centre)
        size, value = size * self.slope, value * self.slope
        rows = (value @ self.weight).abs() + _root(size, self.weight)
        return {
            "grad_hidden": rows.view(*self.shape, rows.shape[-1]),
            "grad_weight": (value.t() @ self.rows).abs() + _root(size.t(), self.rows),
            "grad_bias": value.sum(0).abs() + _root(size.t(), torch.ones_like(self.rows[:, :1])).squeeze(1),
        }


def _root(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The root of the sum of the squared terms of ``left @ right``.

    Each row is scaled by its largest, because squares of what is left of a small probability are 0 in float64 too.
    """
    if not left.shape[1]:
        return left @ right
    largest = left.abs().amax(1, keepdim=True)
    scaled = left / largest.masked_fill(largest == 0, 1.0)
    return (scaled.square() @ right.square()).sqrt() * largest
