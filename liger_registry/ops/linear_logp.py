"""``linear_logp``: each token's log-probability under a linear output head, without (tokens, vocab) of logits.

``z = scale * (hidden @ weight.T + bias)``, rounded once to the dtype of hidden before the scale, or ``softcap *
tanh(z / softcap)`` of it; then, in fp32 (float64 inputs: float64), ``logp = z[target] - logsumexp(z)``. Asked for,
there are also ``logsumexp(z)``, the entropy ``-sum(p * log p)`` of ``p = softmax(z)`` and the index of the largest
``z``, the lowest of several.

Tokens whose target is ``ignore_index`` have 0 in all of these, -1 for the index, and gradients of 0. A target that is
neither ignored nor a class gives NaN in all but the index. What any of the three other outputs is differentiated by may
differ from token to token.

Backward reads the inputs and, of each token, the log of the sum of the other classes' exponentials and the target's
logit apart (see ``ops._logits``), so that a confident token's gradient, ``1 - p``, keeps its digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields, Scalar
from liger_registry.kernels.linear_heuristics import vocab_budget
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, dtype_name
from liger_registry.ops import _linear
from liger_registry.ops._linear import COMPACT, SCALE, SOFTCAP, Sizes
from liger_registry.ops._logits import split_softmax, transformed, wide
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

# tokens, hidden, vocab; the middling one first.
SIZES = ((37, 24, 61), (5, 1, 3), (1, 41, 1), (0, 8, 5), (300, 16, 41), (3, 40, 1537))


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic. See ``ops._linear.validate``."""
    hidden, weight, target, bias = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    _linear.validate("linear_logp", hidden, weight, target, bias)


def check_values(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if a target is neither a class nor ignored."""
    _, weight, target, _ = inputs
    assert weight is not None
    assert target is not None
    _linear.check_targets("linear_logp", target, weight.shape[0], options["ignore_index"])


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and the options that change code."""
    hidden, weight, target, bias = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    return Description(
        dims=Fields(tokens=target.numel(), hidden=hidden.shape[-1], vocab=weight.shape[0]),
        dtypes=Fields(hidden=dtype_name(hidden), weight=dtype_name(weight), bias=dtype_name(bias)),
        flags=Fields(
            softcapped=options["softcap"] != 0, entropy=options["return_entropy"], argmax=options["return_argmax"]
        ),
    )


def fixed(problem: Problem) -> dict[str, Scalar]:
    """A cap where the problem has one, a scale that is not 1, and the outputs that go with the problem's flags."""
    entropy = bool(problem.flags.get("entropy"))
    return {
        "softcap": SOFTCAP if problem.flags.get("softcapped") else 0.0,
        "scale": SCALE,
        "return_logsumexp": entropy,
        "return_entropy": entropy,
        "return_argmax": bool(problem.flags.get("argmax")),
    }


def formula(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float,
    scale: float,
    ignore_index: int,
    return_logsumexp: bool,
    return_entropy: bool,
    return_argmax: bool,
    compact: str,
) -> Tensors:
    """All outputs and saved tensors in order, None for those not asked for."""
    import torch

    logits = _linear.head(hidden, weight, bias)
    z = transformed(logits, softcap, scale)
    log_rest, target_logit, there = split_softmax(z, target)
    counted = target != ignore_index
    # A factor, so that gradients are NaN too.
    spoiled = torch.where(there | ~counted, 1.0, torch.nan).to(z.dtype)

    def output(values: torch.Tensor) -> torch.Tensor:
        return torch.where(counted, values * spoiled, 0.0)

    def row(values: torch.Tensor) -> torch.Tensor:
        return torch.where(counted, values, 0).reshape(-1)

    gap = log_rest - target_logit
    logsumexp = torch.logaddexp(log_rest, target_logit)
    logp = output(-torch.logaddexp(gap, torch.zeros_like(gap)))
    entropy = argmax = mean = None
    if return_entropy:
        p = torch.softmax(z, -1)
        mean = (p * z).sum(-1)
        # Not from the difference of two sums, which keeps nothing of a small entropy.
        entropy = output(-(p * torch.log_softmax(z, -1)).sum(-1))
    if return_argmax:
        largest = transformed(logits.detach(), 0.0, scale).max(-1).indices
        argmax = torch.where(counted, largest, -1)
    whole = output(logsumexp) if return_logsumexp else None
    kept = None if mean is None else row(mean)
    return logp, whole, entropy, argmax, row(log_rest), row(target_logit), kept


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float = 1.0,
    ignore_index: int = -100,
    return_logsumexp: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
    compact: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``logp``, and behind it the outputs that are asked for, in plain, differentiable PyTorch.

    Args:
        hidden: (..., hidden), floating.
        weight: (vocab, hidden), of the dtype of hidden.
        target: (...), int64.
        bias: (vocab,), or None.
        softcap: caps the scaled logits; 0 for none.
        scale: a factor on the logits, before the cap.
        ignore_index: the target of tokens that do not count.
        return_logsumexp: whether ``logsumexp`` is asked for.
        return_entropy: whether ``entropy`` is.
        return_argmax: whether ``argmax`` is.
        compact: whether ignored tokens are left out of the products; concerns time and memory alone.
    """
    found = formula(
        hidden,
        weight,
        target,
        bias,
        softcap,
        scale,
        ignore_index,
        return_logsumexp,
        return_entropy,
        return_argmax,
        compact,
    )[:4]
    given = tuple(y for y in found if y is not None)
    return given if len(given) > 1 else given[0]


def _scheme_reference(*inputs: Any, **options: Any) -> Tensors:
    return formula(*inputs, **options)


def allocate(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> Tensors:
    """Empty outputs of the shape of target, and (tokens,) of each saved tensor; None for those not asked for."""
    import torch

    def new(asked: bool, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        return hidden.new_empty(target.shape, dtype=dtype or wide(hidden.dtype)) if asked else None

    def row(asked: bool = True) -> torch.Tensor | None:
        found = new(asked)
        return None if found is None else found.view(-1)

    entropy = options["return_entropy"]
    outputs = new(True), new(options["return_logsumexp"]), new(entropy), new(options["return_argmax"], torch.int64)
    return (*outputs, row(), row(), row(entropy))


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64; see ``ops._linear.Sizes``."""
    import torch

    sizes = Sizes(inputs, options)
    counted = sizes.target != options["ignore_index"]

    def upstream(gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is None:
            return torch.zeros_like(sizes.lse)
        return torch.where(counted, gradient.reshape(-1), 0.0)

    logp, logsumexp, entropy = (upstream(g) for g in grad_outputs[:3])
    mean = (sizes.p * sizes.error * exponent_of(sizes)).sum(-1)
    grads = sizes.gradients(-logp, logsumexp + entropy, mean=-entropy)
    return {
        "logp": sizes.logp()[1].view(sizes.shape),
        "logsumexp": sizes.lse_error.view(sizes.shape),
        "entropy": (sizes.lse_error + mean).view(sizes.shape),
        "log_rest": sizes.rest_error,
        "target_logit": sizes.logit_error,
        "mean_logit": mean,
        **grads,
    }


def exponent_of(sizes: Sizes) -> torch.Tensor:
    """By how many roundings the probabilities of a call are off, at least one."""
    from liger_registry.ops._logits import exponent

    return exponent(sizes.z, sizes.lse) + sizes.error


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(hidden, weight, target, bias)``, hidden of shape (tokens, hidden); see ``ops._linear.example``."""
    return _linear.example(problem, device, seed, style)


def described(sizes: tuple[int, int, int], dtype: str, bias: str = "none", **on: bool) -> Description:
    """A call of these sizes with some flags on."""
    flags = dict.fromkeys(("softcapped", "entropy", "argmax"), False) | on
    dims = dict(zip(("tokens", "hidden", "vocab"), sizes, strict=True))
    return Description(Fields(dims), Fields(hidden=dtype, weight=dtype, bias=bias), Fields(flags))


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, a bias and every flag in bf16; in other dtypes a few of them."""
    everything = dict.fromkeys(("softcapped", "entropy", "argmax"), True)
    first, last = SIZES[0], SIZES[-1]
    yield described(first, dtype)
    yield described(last, dtype, dtype, **everything)
    if dtype == "bfloat16":
        for sizes in SIZES[1:]:
            yield described(sizes, dtype)
        yield described(first, dtype, dtype)
        for name in everything:
            flag: dict[str, Any] = {name: True}
            yield described(first, dtype, **flag)


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Slabs of every size with a tail, of a narrow head; its width and vocabulary are in no code.

    Tokens are a few less than the problem's, or than two of the largest slabs have.
    """
    tokens = max(1, min(int(problem.tokens), 1 << 16) - 3)
    return ({"tokens": tokens, "hidden": 16, "vocab": 41}, {"tokens": min(5, tokens), "hidden": 24, "vocab": 131})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The output head of a language model, as preference losses and policy gradients read it."""
    if architecture.vocab:
        sizes = tokens, architecture.hidden, architecture.vocab
        yield described(sizes, dtype, softcapped=architecture.softcap != 0)


OP = Op(
    by_name=True,
    name="linear_logp",
    doc="Each token's log-probability under a linear output head, without materialising the logits.",
    inputs=(Input("hidden"), Input("weight"), Input("target", differentiable=False), Input("bias", optional=True)),
    options=(
        Option("softcap", float, 0.0, minimum=0.0, doc="caps the scaled logits by a tanh; 0 for none"),
        Option("scale", float, 1.0, doc="a factor on the logits, before the cap"),
        Option("ignore_index", int, -100, doc="the target of tokens that do not count"),
        Option("return_logsumexp", bool, False, doc="whether the logsumexp is returned too"),
        Option("return_entropy", bool, False, doc="whether the entropy is"),
        Option("return_argmax", bool, False, doc="whether the index of the largest logit is"),
        Option("compact", str, "auto", choices=COMPACT, doc="whether ignored tokens are left out of the products"),
    ),
    outputs=("logp", "logsumexp", "entropy", "argmax"),
    schemes=(
        Scheme(
            "recompute",
            saved_inputs=("hidden", "weight", "target", "bias"),
            saved=("log_rest", "target_logit", "mean_logit"),
            allocate=allocate,
            reference=_scheme_reference,
        ),
    ),
    dims={"tokens": DimKind.BUCKET, "hidden": DimKind.EXACT, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={
        **{name: ("hidden", "vocab") for name in ("logp", "logsumexp", "entropy", "log_rest", "mean_logit")},
        "target_logit": ("hidden",),
        "grad_hidden": ("vocab",),
        "grad_weight": ("tokens",),
        "grad_bias": ("tokens",),
    },
    example=example,
    proxies=proxies,
    calls=calls,
    order={FORWARD: ("vocab_slabs", "row_slabs"), BACKWARD: ("vocab_slabs",)},
    budget=vocab_budget,
    odd=odd,
    asked={"logsumexp": "return_logsumexp", "entropy": "return_entropy", "argmax": "return_argmax"},
    constant=frozenset({"argmax"}),
    fixed=fixed,
    check_values=check_values,
    autocast=("hidden", "weight", "bias"),
    compiled=lambda options: {**options, "compact": "off"} if options["compact"] == "auto" else options,
)
