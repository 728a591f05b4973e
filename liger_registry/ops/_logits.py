"""What the contracts of losses over logits have in common: statistics of rows of logits, in plain PyTorch.

The softmax of a row is kept in two parts: ``target_logit``, the target's logit, and ``log_rest``, the log of the sum of
all other exponentials. With ``d = log_rest - target_logit`` the loss is ``log(1 + exp(d))`` and the gradient of the
target's logit ``-1 / (1 + exp(-d))``; neither cancels for a confident row, where a logsumexp that holds the target's
own exponential leaves of the rest what fp32 keeps behind 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry.examples import fill

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16", "float64")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: fp32, for float64 float64."""
    import torch

    return torch.promote_types(dtype, torch.float32)


def transformed(logits: torch.Tensor, softcap: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    """``z``: scaled logits, and capped by ``softcap * tanh(. / softcap)`` unless softcap is 0; in the wide dtype."""
    z = logits.to(wide(logits.dtype))
    if scale != 1.0:
        z = z * scale
    return _tanh(z / softcap) * softcap if softcap else z


def _tanh(u: torch.Tensor) -> torch.Tensor:
    """``tanh(u)`` whose derivative under autograd keeps its digits: ``1 - tanh^2`` is 0 in fp32 from 9 on."""
    import torch

    e = (-2.0 * u.abs()).exp()
    return torch.where(u.abs() < 0.5, u.tanh(), u.sign() * (1.0 - e) / (1.0 + e))


def is_target(target: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where rows have their target: whether there is one, its index (0 if not), and a mask over the columns.

    Args:
        target: (...) int64; any value outside [0, vocab) is none.
        vocab: the number of columns.
    """
    import torch

    there = (target >= 0) & (target < vocab)
    index = torch.where(there, target, 0)
    mask = (torch.arange(vocab, device=target.device) == index[..., None]) & there[..., None]
    return there, index, mask


def log_sum(z: torch.Tensor) -> torch.Tensor:
    """The log of the sum of exponentials of each row; -inf, with gradients of 0, where all of it is -inf."""
    import torch

    anchor = z.detach().amax(-1, keepdim=True)
    anchor = anchor.masked_fill(anchor == -torch.inf, 0.0)
    total = (z - anchor).exp().sum(-1)
    empty = total == 0
    return torch.where(empty, -torch.inf, total.masked_fill(empty, 1.0).log() + anchor.squeeze(-1))


def split_softmax(z: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(log_rest, target_logit, there)`` of transformed logits.

    Args:
        z: (..., vocab), in the wide dtype.
        target: (...) int64; any value outside [0, vocab) is none, and ``target_logit`` then 0.
    """
    import torch

    there, index, mask = is_target(target, z.shape[-1])
    log_rest = log_sum(z.masked_fill(mask, -torch.inf))
    target_logit = torch.where(there, z.gather(-1, index[..., None]).squeeze(-1), 0.0)
    return log_rest, target_logit, there


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``, without the threshold of 20 beyond which PyTorch's returns x itself."""
    import torch

    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


def exponent(z: torch.Tensor, *logs: torch.Tensor) -> torch.Tensor:
    """How much larger than a rounding the relative error of ``exp(z - log)`` in fp32 may be.

    It is the rounding errors of z and of each log, absolute ones; an element may be off by several roundings anyway, so
    only numbers beyond eight count.
    """
    size = z.abs()
    for log in logs:
        size = size + log[..., None].abs()
    return (size.nan_to_num(0.0, 0.0, 0.0) / 8).clamp_min(1.0)


def derivative(logits: torch.Tensor, softcap: float, scale: float) -> torch.Tensor:
    """``dz / dlogits`` where there is a cap: ``4 e / (1 + e)^2`` with ``e = exp(-2 |u|)``; in the wide dtype."""
    e = (-2.0 * (logits.to(wide(logits.dtype)) * (scale / softcap)).abs()).exp()
    return e / (1.0 + e).square() * (4.0 * scale)


def slope(logits: torch.Tensor, softcap: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``|dz / dlogits|``, and the same with the error of its own exponential, as ``exponent`` counts it."""
    if not softcap:
        return (size := logits.new_full((), abs(scale))), size
    u = logits * (scale / softcap)
    size = derivative(logits, softcap, scale).abs()
    return size, size * (u.abs() / 4).clamp_min(1.0).nan_to_num(1.0, 1.0, 1.0)


def targets(rows: int, vocab: int, device: torch.device | str, seed: int, others: tuple[int, ...]) -> torch.Tensor:
    """(rows,) int64: random classes, the last row's the last class, and every fifth one of ``others`` in turn."""
    import torch

    if str(device) == "meta":
        return torch.empty(rows, dtype=torch.int64, device=device)
    generator = torch.Generator(device=device).manual_seed(seed + 2)
    target = torch.randint(vocab, (rows,), generator=generator, device=device)
    target[-1:] = vocab - 1
    for start, other in enumerate(others):
        target[3 + 5 * start :: 5 * len(others)] = other
    return target


def class_weights(vocab: int, dtype: torch.dtype, device: torch.device | str, seed: int) -> torch.Tensor:
    """(vocab,) around 1."""
    weight = fill((vocab,), dtype, device, seed + 1, "random", 0.25)
    return weight if str(device) == "meta" else weight.abs() + 0.5
