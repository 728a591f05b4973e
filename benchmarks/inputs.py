"""The tensors of a case and its formula in plain PyTorch; random data, because zeros run faster than what is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case

Call = Callable[..., Any]
DTYPE = torch.bfloat16
EPS = 1e-6
IGNORED = -100


@dataclass(slots=True)
class Inputs:
    """What a call takes, and what its outputs are differentiated by.

    Attributes:
        tensors: the arguments in order; those that need a gradient say so.
        upstream: one gradient an output; None for a scalar loss.
    """

    tensors: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...] | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """The arguments that need a gradient."""
        return [t for t in self.tensors if t.requires_grad]

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Arguments and upstream gradients."""
        return *self.tensors, *(self.upstream or ())

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.numel() * t.element_size() for t in self.all)

    def clone(self) -> Inputs:
        """The same values and strides in memory of their own."""
        upstream = None if self.upstream is None else tuple(t.clone() for t in self.upstream)
        return Inputs(
            tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors),
            upstream,
        )

    def restore(self, source: Inputs) -> None:
        """Take the values of another, where a call wrote into these."""
        with torch.no_grad():
            for mine, theirs in zip(self.all, source.all, strict=True):
                mine.copy_(theirs)

    def equals(self, other: Inputs) -> bool:
        """Whether all values are the same."""
        return all(torch.equal(a, b) for a, b in zip(self.all, other.all, strict=True))


def make(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """The inputs of a case, different for each seed."""
    generator = torch.Generator(device).manual_seed(1000 * seed + 7)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=DTYPE).mul_(scale)

    def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return normal(*shape, scale=scale).add_(shift).requires_grad_()

    if case.op in ("rope", "qk_norm_rope"):
        return _heads(case, normal)
    if case.op == "cross_entropy":
        rows, vocab = case.sizes
        target = torch.randint(vocab, (rows,), device=device, generator=generator)
        return Inputs((leaf(rows, vocab), target))
    if case.linear:
        tokens, hidden, vocab = case.sizes
        target = torch.randint(vocab, (tokens,), device=device, generator=generator)
        # Spread over the batch, as padding and prompts are, not one half.
        order = torch.randperm(tokens, device=device, generator=generator)
        target[order[: case.ignored_tokens]] = IGNORED
        upstream = (normal(tokens).float(),) if case.op == "linear_logp" else None
        return Inputs((leaf(tokens, hidden), leaf(vocab, hidden, scale=0.02), target), upstream)
    rows, width = case.sizes
    upstream = (normal(rows, width),)
    if case.op in ("swiglu", "geglu"):
        return Inputs((leaf(rows, width), leaf(rows, width)), upstream)
    weight = leaf(width, scale=0.1, shift=1.0 - case.offset)
    if case.op == "layer_norm":
        return Inputs((leaf(rows, width), weight, leaf(width, scale=0.1)), upstream)
    if case.op == "fused_add_rms_norm":
        return Inputs((leaf(rows, width), leaf(rows, width), weight), (*upstream, normal(rows, width)))
    return Inputs((leaf(rows, width), weight), upstream)


def _heads(case: Case, normal: Callable[..., Tensor]) -> Inputs:
    batch, length, heads, kv_heads, width = case.sizes

    # As models have them: a projection's result seen as (batch, heads, tokens, head_dim).
    def turned(count: int) -> Tensor:
        return normal(batch, length, count, width).transpose(1, 2)

    q, k = turned(heads).requires_grad_(), turned(kv_heads).requires_grad_()
    angle = torch.arange(length, device=q.device)[:, None] * torch.logspace(0, -4, width // 2, device=q.device)
    angle = torch.cat((angle, angle), -1)[None]
    tables = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    upstream = tuple(normal(batch, n, length, width) if case.turned else turned(n) for n in (heads, kv_heads))
    if case.op == "rope":
        return Inputs((q, k, *tables), upstream)
    weights = tuple(normal(width, scale=0.1).add_(1.0).requires_grad_() for _ in range(2))
    return Inputs((q, k, *weights, *tables), upstream)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def _norm(case: Case) -> Call:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        if case.casting == "llama":
            return F.rms_norm(x, x.shape[-1:], weight, EPS)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (wide * (weight.float() + case.offset)).to(x.dtype)

    return norm


def _capped(case: Case, logits: Tensor) -> Tensor:
    return torch.tanh(logits / case.softcap) * case.softcap if case.softcap else logits


def formula(case: Case, wide: bool = False) -> Call:
    """The case in plain, differentiable PyTorch.

    Args:
        case: what.
        wide: whether losses take their logits in fp32, as Hugging Face models do; with True it is what the errors of
            all candidates are taken against, and what torch.compile gets.
    """
    norm = _norm(case)

    def logits(hidden: Tensor, weight: Tensor) -> Tensor:
        found = F.linear(hidden, weight)
        return _capped(case, found.float() if wide or case.op == "linear_logp" else found)

    def logp(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        counted = target != IGNORED
        picked = torch.log_softmax(logits(hidden, weight), -1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
        return torch.where(counted, picked, 0.0)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, weight), total

    def qk(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _turn(norm(q, qw), cos, sin), _turn(norm(k, kw), cos, sin)

    found: dict[str, Call] = {
        "rms_norm": norm,
        "fused_add_rms_norm": add_norm,
        "layer_norm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        "rope": lambda q, k, cos, sin: (_turn(q, cos, sin), _turn(k, cos, sin)),
        "qk_norm_rope": qk,
        "cross_entropy": lambda x, target: F.cross_entropy(x.float() if wide else x, target),
        "fused_linear_cross_entropy": lambda x, w, target: F.cross_entropy(logits(x, w), target),
        "linear_logp": logp,
    }
    return found[case.op]


def outputs_of(found: Any) -> tuple[Tensor, ...]:
    """A call's results as a tuple."""
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def backward(outputs: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    """The gradients of all leaves."""
    return torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)


def relative_error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest of the tensors' errors, norm of the difference over norm; NaN stays NaN."""
    return max((error(a, b) for a, b in zip(found, right, strict=True)), key=lambda e: float("inf") if e != e else e)


def error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right, summed in float64 over blocks."""
    difference = total = 0.0
    for a, b in zip(torch.split(found.reshape(-1), 1 << 27), torch.split(right.reshape(-1), 1 << 27), strict=True):
        wide = b.detach().double()
        difference += float((a.detach().double() - wide).square().sum())
        total += float(wide.square().sum())
    return float((difference / total) ** 0.5) if total else difference**0.5
