"""Examples of ``cross_entropy``, and how large the terms are that it sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.examples import fill
from liger_registry.op import Description
from liger_registry.ops._logits import class_weights, exponent, is_target, slope, split_softmax, targets, transformed
from liger_registry.problem import Problem

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor | None, ...]

#: For each flag the option of which the key knows only whether it is 0, and a number that stands for others.
CLASSES = {
    "smoothed": ("label_smoothing", 0.1),
    "squared": ("lse_square_scale", 1e-3),
    "capped": ("softcap", 30.0),
}
SWITCHES = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "in_place")
# Odd sizes, the middling one first; 5000 is wider than a block of the implementations that loop.
SIZES = ((5, 41), (5, 1), (9, 3), (3, 1536), (0, 41), (1, 41), (2, 5000))


def flags(**on: Any) -> dict[str, Any]:
    """All flags, off but for the given ones."""
    return {"reduction": "mean"} | dict.fromkeys((*CLASSES, *SWITCHES), False) | on


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(logits, target, class_weight, None)`` for a problem, logits of (rows, vocab); every fifth row is ignored."""
    import torch

    rows, vocab, dtypes = problem.rows, problem.vocab, problem.dtypes
    logits = fill((rows, vocab), getattr(torch, str(dtypes["logits"])), device, seed, style)
    target = targets(rows, vocab, device, seed, (-100,))
    if dtypes["class_weight"] == "none":
        return logits, target, None, None
    return logits, target, class_weights(vocab, getattr(torch, str(dtypes["class_weight"])), device, seed), None


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, and every option at one of them; in fp16 and fp32 a few of them."""
    weight = "float64" if dtype == "float64" else "float32"

    def described(rows: int, vocab: int, class_weight: str = "none", **on: Any) -> Description:
        return Description(
            Fields(rows=rows, vocab=vocab), Fields(logits=dtype, class_weight=class_weight), Fields(flags(**on))
        )

    everything = dict.fromkeys((*CLASSES, *SWITCHES), True)
    if dtype in ("float16", "float32"):
        # Of the code that is bf16's, only what reads and writes another dtype is new.
        for rows, vocab in SIZES[:1] + SIZES[3:4]:
            yield described(rows, vocab)
        yield described(5, 41, weight, **everything, reduction="none")
        return
    for rows, vocab in SIZES:
        yield described(rows, vocab)
    for name in (*CLASSES, *SWITCHES):
        yield described(5, 41, "none", **{name: True})
    yield described(5, 41, weight)
    for reduction in ("sum", "none"):
        yield described(9, 3, reduction=reduction)
    for reduction in ("mean", "sum", "none"):
        yield described(5, 41, weight, **everything, reduction=reduction)
    for rows, vocab in ((2, 5000), (0, 3)):
        yield described(rows, vocab, weight, **everything)


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows of the true vocabulary, a multiple of no tile; the vocabulary is in the code and is never changed."""
    # 2^21 elements keep one check under 20 ms on a GPU.
    return ({"rows": max(3, min(261, (1 << 21) // problem.vocab))}, {"rows": 1})


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64, with the errors of logs and exponentials that stand in them."""
    import torch

    logits, target, class_weight, num_items = inputs
    assert logits is not None
    assert target is not None
    shape, vocab = target.shape, logits.shape[-1]
    smoothing, square = options["label_smoothing"], options["lse_square_scale"]
    flat, target = logits.reshape(-1, vocab), target.reshape(-1)
    counted = target != options["ignore_index"]
    z = transformed(flat, options["softcap"]).masked_fill(~counted[:, None], 0.0)
    known = z.masked_fill(z.isinf(), 0.0)
    log_rest, target_logit, there = split_softmax(z, torch.where(counted, target, -1))
    lse, difference = torch.logaddexp(log_rest, target_logit), log_rest - target_logit
    share, own = torch.sigmoid(difference), torch.sigmoid(-difference)
    every = torch.ones_like(z[:1]) if class_weight is None else class_weight.to(z.dtype)[None]
    weight = every.expand(z.shape[0], vocab).gather(1, torch.where(there, target, 0)[:, None])[:, 0]

    # An error of the logs moves the loss by the share of the rest.
    # Below the normal numbers of fp32 an exponential has no digits, and a large gradient multiplies what is left.
    p = torch.softmax(z, -1) + 2.0**-100
    logs = 1.0 + log_rest.nan_to_num(0.0, 0.0, 0.0).abs() + target_logit.abs() + (p * known.abs()).sum(-1)
    nll = torch.nn.functional.softplus(difference)
    main = (1 - smoothing) * weight * (nll + share * logs)
    if smoothing:
        sums = every.sum() * (lse.abs() + logs) + (every * known).abs().sum(-1)
        main = main + smoothing / vocab * sums
    squares = square * lse.abs() * (lse.abs() + 2 * logs)
    main, squares = (torch.where(there, terms, 0.0) for terms in (main, squares))

    def inverse(number: torch.Tensor) -> torch.Tensor:
        return torch.where(number == 0, 0.0, 1.0 / torch.where(number == 0, 1.0, number))

    one = torch.ones((), dtype=z.dtype, device=z.device)
    shares = one, one
    if options["reduction"] == "mean":
        counts = torch.stack([(weight * there).sum(), counted.sum().to(z.dtype)])
        items = counts if num_items is None else num_items.reshape(-1).to(z.dtype)
        shares = inverse(items[0]).abs(), inverse(items[-1]).abs()
    if options["reduction"] == "none":
        loss, z_loss = (main + squares).reshape(shape), squares.reshape(shape)
    else:
        loss, z_loss = main.sum() * shares[0] + squares.sum() * shares[1], squares.sum() * shares[1]
    sizes = {
        "loss": loss,
        "z_loss": z_loss,
        "log_rest": torch.where(there, 1.0 + log_rest.abs() + (p * known.abs()).sum(-1), 0.0),
        "target_logit": torch.where(there, target_logit.abs(), 0.0),
    }
    if grad_outputs[0] is None:
        return sizes
    upstream = grad_outputs[0].reshape(-1).abs() * there
    mine, its = upstream * shares[0] * (1 - smoothing) * weight, upstream * shares[0] * smoothing / vocab
    both = its * every.sum() + upstream * shares[1] * 2 * square * lse.abs()
    _, _, mask = is_target(torch.where(there, target, -1), vocab)
    grown = exponent(known, lse)
    dz = (mine + both)[:, None] * p * grown
    # The logs' own errors are in the share of the rest too.
    size = 1.0 + (log_rest.nan_to_num(0.0, 0.0, 0.0).abs() + target_logit.abs()) / 8
    dz = torch.where(mask, (size * (mine * share + both * own))[:, None], dz) + its[:, None] * every
    dz = dz * slope(flat, options["softcap"], 1.0)[1]
    return {**sizes, "grad_logits": torch.where(there[:, None], dz, 0.0).reshape(logits.shape)}
